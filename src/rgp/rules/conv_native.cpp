// The thin gradients of a convolution for every example of a batch: float32, CPUs with AVX-512. Called by conv_native.py.
//
//   u_t = sum_o L_o g_ot          dR_c,ab = sum_t u_t x_c,t+ab       (ab: a position in the kernel; t+ab: where it reads for output t)
//   z_t = sum_c,ab R_c,ab x_c,t+ab     dL_o = sum_t z_t g_ot
//
// A vector V holds one number for each of up to 16 carriers, so each line is a sum of V times a single number. A thread works on
// one example at a time, 16 input channels at a time, which stay in its caches; nothing is unfolded.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

typedef float V __attribute__((vector_size(64), aligned(4), may_alias));
typedef int64_t Int;
constexpr Int LANES = 16;

V& at(float* p) { return *reinterpret_cast<V*>(p); }
V at(const float* p) { return *reinterpret_cast<const V*>(p); }

struct Shape {
    Int channels, height, width, outputs, out_height, out_width, kernel[2], stride[2], padding[2], dilation[2];
};

// Transposes ----------------------------------------------------------------------------------------------------------

template <int S>
void swap_blocks(V (&rows)[16]) {  // of S x S, beside the diagonal
    alignas(64) int32_t first[16], second[16];
    for (int l = 0; l < 16; l++) {
        first[l] = l & S ? l + 16 - S : l;
        second[l] = l & S ? l + 16 : l + S;
    }
    const __m512i one = _mm512_load_si512(first), two = _mm512_load_si512(second);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        if (!(i & S)) {
            const __m512 a = rows[i], b = rows[i + S];
            rows[i] = _mm512_permutex2var_ps(a, one, b);
            rows[i + S] = _mm512_permutex2var_ps(a, two, b);
        }
}

void transpose_tile(const float* from, Int from_stride, float* to, Int to_stride) {  // 16 x 16
    V rows[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) rows[i] = at(from + i * from_stride);
    swap_blocks<1>(rows);
    swap_blocks<2>(rows);
    swap_blocks<4>(rows);
    swap_blocks<8>(rows);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) at(to + i * to_stride) = rows[i];
}

void transpose(const float* from, Int from_stride, float* to, Int to_stride, Int rows, Int columns) {
    for (Int i = 0; i < rows; i += 16)
        for (Int j = 0; j < columns; j += 16) {
            const float* f = from + i * from_stride + j;
            float* t = to + j * to_stride + i;
            if (i + 16 <= rows && j + 16 <= columns) {
                transpose_tile(f, from_stride, t, to_stride);
                continue;
            }
            for (Int a = 0; a < std::min<Int>(16, rows - i); a++)
                for (Int b = 0; b < std::min<Int>(16, columns - j); b++) t[b * to_stride + a] = f[a * from_stride + b];
        }
}

// The four sums, a block of results at a time, which stays in registers --------------------------------------------------

template <int B>
void sum_u(const float* g, const float* L, float* u, Int outputs, Int positions) {
    V sums[B] = {};
    for (Int o = 0; o < outputs; o++, g += positions, L += LANES)
        for (int j = 0; j < B; j++) sums[j] += at(L) * g[j];
    for (int j = 0; j < B; j++) at(u + LANES * j) = sums[j];
}

template <int B>
void sum_dL(const float* g, const float* z, float* dL, Int positions) {
    V sums[B] = {};
    for (Int t = 0; t < positions; t++, z += LANES)
        for (int j = 0; j < B; j++) sums[j] += at(z) * g[j * positions + t];
    for (int j = 0; j < B; j++) at(dL + LANES * j) = sums[j];
}

// x: pixels of 16 channels each, x_width of them in a row; z: z_width positions in a row
template <int ROWS, int B>
void add_z(const float* x, Int x_width, const float* R, float* z, Int z_width, Int channels, const Shape& s) {
    V sums[ROWS][B];
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < B; j++) sums[i][j] = at(z + LANES * (i * z_width + j));
    const Int taps = s.kernel[0] * s.kernel[1];
    for (Int a = 0; a < s.kernel[0]; a++)
        for (Int b = 0; b < s.kernel[1]; b++) {
            const float* r = R + (a * s.kernel[1] + b) * LANES;
            const float* pixel = x + (a * s.dilation[0] * x_width + b * s.dilation[1]) * 16;
            for (Int c = 0; c < channels; c++, r += taps * LANES, pixel++)
                for (int i = 0; i < ROWS; i++)
                    for (int j = 0; j < B; j++)
                        sums[i][j] += at(r) * pixel[(i * s.stride[0] * x_width + j * s.stride[1]) * 16];
        }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < B; j++) at(z + LANES * (i * z_width + j)) = sums[i][j];
}

template <int B>
void sum_dR(const float* x, Int x_width, const float* u, float* dR, const Shape& s) {  // 8 channels, B positions in the kernel
    V sums[B][8] = {};
    for (Int y = 0; y < s.out_height; y++) {
        const float* pixel = x + y * s.stride[0] * x_width * 16;
        for (Int t = 0; t < s.out_width; t++, pixel += 16 * s.stride[1], u += LANES)
            for (int b = 0; b < B; b++)
                for (int c = 0; c < 8; c++) sums[b][c] += at(u) * pixel[b * s.dilation[1] * 16 + c];
    }
    for (int b = 0; b < B; b++)
        for (int c = 0; c < 8; c++) at(dR + LANES * (c * s.kernel[0] * s.kernel[1] + b)) = sums[b][c];
}

// One example ----------------------------------------------------------------------------------------------------------

struct Example {
    const Shape& s;
    const Int rank, positions, taps, padded_height;
    const Int z_width;  // a row of z: whole blocks of 8 positions
    const Int x_width;  // a row of x with its padding, and with all that such a row of z reads
    std::vector<float> u, z, x, result;

    Example(const Shape& s, Int rank)
        : s(s),
          rank(rank),
          positions(s.out_height * s.out_width),
          taps(s.kernel[0] * s.kernel[1]),
          padded_height(s.height + 2 * s.padding[0]),
          z_width((s.out_width + 7) / 8 * 8),
          x_width(std::max(s.width + 2 * s.padding[1], (z_width - 1) * s.stride[1] + (s.kernel[1] - 1) * s.dilation[1] + 1)),
          u(positions * LANES),
          z(s.out_height * z_width * LANES),
          x(padded_height * x_width * 16),
          result(std::max(s.outputs, 16 * taps) * LANES) {}

    void find_u(const float* g, const float* L) {
        for (Int t = 0; t < positions; t += 16) {
            const Int first = std::min(t, positions - 16);  // the last block may overlap with the one before
            sum_u<16>(g + first, L, &u[first * LANES], s.outputs, positions);
        }
    }

    void load(const float* from, Int channels) {
        for (Int y = 0; y < s.height; y++) {
            float* to = &x[((y + s.padding[0]) * x_width + s.padding[1]) * 16];
            transpose(from + y * s.width, s.height * s.width, to, 16, channels, s.width);
        }
    }

    void find_z(const float* R, Int channels) {
        for (Int y = 0; y < s.out_height;) {
            const Int rows = z_width % 16 && y + 2 <= s.out_height ? 2 : 1;
            for (Int t = 0; t < z_width;) {
                const float* from = &x[(y * s.stride[0] * x_width + t * s.stride[1]) * 16];
                float* to = &z[(y * z_width + t) * LANES];
                if (rows == 2)
                    add_z<2, 8>(from, x_width, R, to, z_width, channels, s), t += 8;
                else if (t + 16 <= z_width)
                    add_z<1, 16>(from, x_width, R, to, z_width, channels, s), t += 16;
                else
                    add_z<1, 8>(from, x_width, R, to, z_width, channels, s), t += 8;
            }
            y += rows;
        }
    }

    void find_dR(float* dR, Int channels) {
        for (Int c = 0; c < channels; c += 8)
            for (Int a = 0; a < s.kernel[0]; a++)
                for (Int b = 0; b < s.kernel[1];) {
                    const float* from = &x[(a * s.dilation[0] * x_width + b * s.dilation[1]) * 16 + c];
                    float* to = &result[(c * taps + a * s.kernel[1] + b) * LANES];
                    if (b + 3 <= s.kernel[1])
                        sum_dR<3>(from, x_width, u.data(), to, s), b += 3;
                    else
                        sum_dR<1>(from, x_width, u.data(), to, s), b += 1;
                }
        transpose(result.data(), LANES, dR, s.channels * taps, channels * taps, rank);
    }

    void project(const float* L) {  // dL <- (I - L L^T) dL
        V core[LANES] = {};
        for (Int o = 0; o < s.outputs; o++)
            for (int j = 0; j < LANES; j++) core[j] += at(&result[o * LANES]) * L[o * LANES + j];
        for (Int o = 0; o < s.outputs; o++) {
            V sums[4] = {at(&result[o * LANES])};
            for (int j = 0; j < LANES; j++) sums[j % 4] -= core[j] * L[o * LANES + j];
            at(&result[o * LANES]) = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        }
    }

    void find_dL(const float* g, float* dL, const float* L) {  // L: project with it, or null
        for (Int y = 1; y < s.out_height && z_width > s.out_width; y++)  // leave out what is between the rows of z
            std::copy_n(&z[y * z_width * LANES], s.out_width * LANES, &z[y * s.out_width * LANES]);
        for (Int o = 0; o < s.outputs;) {
            if (o + 8 <= s.outputs)
                sum_dL<8>(g + o * positions, z.data(), &result[o * LANES], positions), o += 8;
            else
                sum_dL<1>(g + o * positions, z.data(), &result[o * LANES], positions), o += 1;
        }
        if (L) project(L);
        transpose(result.data(), LANES, dL, s.outputs, s.outputs, rank);
    }
};

}  // namespace

// x (m, channels, height, width), g (m, outputs, out_height, out_width); Lt (rank, outputs) and dL, R (rank, channels * taps) and dR:
// null for a side that is not wanted. projects: find (I - L L^T) dL in place of dL. Example i's results begin i * dL_step and i * dR_step behind dL and dR. At least 16 output
// positions, rank at most 16.
extern "C" void rgp_thin_gradients(const float* x, const float* g, const float* Lt, const float* R, float* dL, float* dR, Int dL_step,
                                   Int dR_step, Int examples, Int rank, Int projects, Int threads, const Shape* shape) {
    const Shape& s = *shape;
    const Int taps = s.kernel[0] * s.kernel[1], pixels = s.height * s.width, positions = s.out_height * s.out_width;
    std::vector<float> L_lanes(Lt ? s.outputs * LANES : 0), R_lanes(R ? s.channels * taps * LANES : 0);
    if (Lt) transpose(Lt, s.outputs, L_lanes.data(), LANES, rank, s.outputs);
    if (R) transpose(R, s.channels * taps, R_lanes.data(), LANES, rank, s.channels * taps);
#pragma omp parallel num_threads(threads)
    {
        Example example(s, rank);
#pragma omp for
        for (Int i = 0; i < examples; i++) {
            const float *gi = g + i * s.outputs * positions, *xi = x + i * s.channels * pixels;
            if (Lt) example.find_u(gi, L_lanes.data());
            if (R) std::fill(example.z.begin(), example.z.end(), 0.0f);
            for (Int c = 0; c < s.channels; c += 16) {
                const Int channels = std::min<Int>(16, s.channels - c);
                example.load(xi + c * pixels, channels);
                if (R) example.find_z(&R_lanes[c * taps * LANES], channels);
                if (Lt) example.find_dR(dR + i * dR_step + c * taps, channels);
            }
            if (R) example.find_dL(gi, dL + i * dL_step, projects ? L_lanes.data() : nullptr);
        }
    }
}
