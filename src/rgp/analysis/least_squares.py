"""The paper's proposition and remark on least squares, L(W) = 1/n sum_i |y_i - W x_i|^2, as experiments.

Shapes: W (p, d), n examples, rank r, carriers L (p, r) and R (r, d), k = r (p + d).

Proposition: the gradients of gradient descent share the range and null space of the first one. With H = 2/n sum_i x_i x_i^T,
dW_t = dW_1 (I - eta H)^(t-1). The factor stands on the right: columns of dW_t stay in the range of dW_1 always; rows stay
in its row space only if H maps that space into itself. `proposition` measures both, where that holds and where not.

Remark: with the subspace known (an oracle: not private), full batches, eta = 1/beta, T = n beta epsilon / sqrt(p) and the
averaged iterate, the excess risk is O(sqrt(k log(1/delta)) / (n epsilon)). `rate` runs it, noise and clipping included,
and fits log-log slopes. The features are scaled coordinate axes, each as often as the next, so that H = lambda I, the
rank-r gradient subspace is exactly kept, and clipping every example costs d norms and not n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rgp.analysis import NOT_PRIVATE

Array = np.ndarray
BETA, CLIP, DISTANCE = 1.0, 1.0, 1.0  # smoothness, C, |W_0 - W_*|


# ---------------------------------------------------------------------- the proposition


def proposition(
    *, p: int = 12, d: int = 20, n: int = 200, rank: int = 3, steps: int = 200, seed: int = 0
) -> list[dict]:
    """The largest |(I - U1 U1^T) dW_t|, |dW_t (I - V1 V1^T)| and |(I - U1 U1^T) dW_t (I - V1 V1^T)| over gradient descent.

    Each relative to |dW_1| ("left", "right", "both") and to |dW_t| ("..._relative"), as long as that is above 1e-6 |dW_1|:
    rounding has the size of dW_1's. "features": the x_i span r dimensions only. "isotropic": y = W_* x with W_* of rank
    r, H a multiple of I. "targets": the same with a general H, for which the proposition's second half does not hold.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    low = rng.standard_normal((p, rank)) @ rng.standard_normal((rank, d))
    spread = np.diag(np.linspace(0.3, 1.0, d))
    X = spread @ rng.standard_normal((d, n))
    thin = np.linalg.qr(rng.standard_normal((d, rank)))[0] @ rng.standard_normal((rank, n))
    flat = np.linalg.qr(rng.standard_normal((n, d)))[0].T * math.sqrt(n)
    cases = [
        ("features", "features of rank r, any targets", thin, rng.standard_normal((p, n))),
        ("isotropic", "targets W_* x with W_* of rank r, H a multiple of I", flat, low @ flat),
        ("targets", "targets W_* x with W_* of rank r, any H", X, low @ X),
    ]
    return [{"case": name, "data": what, **_descend(x, y, rank, steps)} for name, what, x, y in cases]


def _descend(X: Array, Y: Array, rank: int, steps: int) -> dict[str, Any]:
    n = X.shape[1]
    H, S = 2 / n * X @ X.T, 2 / n * Y @ X.T
    eta = 0.5 / np.linalg.eigvalsh(H)[-1]
    W = np.zeros((Y.shape[0], X.shape[0]))
    G = W @ H - S
    left, values, right = np.linalg.svd(G, full_matrices=False)
    U, V = left[:, :rank], right[:rank].T
    first = last = float(np.linalg.norm(G))
    worst = {f"{side}{of}": 0.0 for of in ("", "_relative") for side in ("left", "right", "both")}
    for _ in range(steps):
        if np.linalg.norm(G) < 1e-6 * first:
            break
        off_left, off_right = G - U @ (U.T @ G), G - (G @ V) @ V.T
        both = off_left - (off_left @ V) @ V.T
        last = float(np.linalg.norm(G))
        for name, rest in (("left", off_left), ("right", off_right), ("both", both)):
            for key, unit in ((name, first), (f"{name}_relative", last)):
                worst[key] = max(worst[key], float(np.linalg.norm(rest)) / unit)
        W = W - eta * G
        G = W @ H - S
    rank_of_first = int((values > 1e-9 * values[0]).sum())
    return {"rank_of_first_gradient": rank_of_first, "gradient_shrank_to": last / first, **worst}


# ---------------------------------------------------------------------- the remark


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One setting of the remark. `spectrum`: lambda = beta / d ("easy"), or the hardest for T ("hard")."""

    n: int = 4096
    epsilon: float = 2.0
    p: int = 16
    d: int = 32
    r: int = 4
    delta: float = 1e-5
    spectrum: str = "hard"
    steps: str = "balanced"

    @property
    def k(self) -> int:
        return self.r * (self.p + self.d)

    @property
    def T(self) -> int:
        """The remark's n beta epsilon / sqrt(p), or what balances its two error terms: sqrt(k log(1/delta)) for sqrt(p)."""
        below = self.p if self.steps == "remark" else self.k * math.log(1 / self.delta)
        return max(2, round(self.n * BETA * self.epsilon / math.sqrt(below)))

    @property
    def bound(self) -> float:
        """The remark's rate without its constant."""
        return math.sqrt(self.k * math.log(1 / self.delta)) / (self.n * self.epsilon)

    @property
    def noise(self) -> float:
        """Standard deviation of the noise in one coordinate of the mean gradient: sigma C / n, for T full batches."""
        return math.sqrt(self.T) / gaussian_mu(self.epsilon, self.delta) * CLIP / self.n

    @property
    def curvature(self) -> float:
        """lambda, at most beta / d: then no example's gradient is above C near the start."""
        if self.spectrum == "easy":
            return BETA / self.d
        grid = np.geomspace(0.01 / self.T, 1, 400) * BETA / self.d
        return float(grid[np.argmax([self.expected(x) for x in grid])])

    def expected(self, curvature: float) -> float:
        """Excess risk of the averaged iterate if no example is clipped: what is left of W_0 - W_*, and the noise."""
        keep = 1 - curvature / BETA
        powers = keep ** np.arange(self.T + 1)
        left = powers[1:].mean()
        weights = (1 - powers[1:]) / (curvature * self.T)  # of the noise of each step, last step first
        dims = self.r * (self.p + self.d - self.r)
        return float(curvature / 2 * ((left * DISTANCE) ** 2 + dims * self.noise**2 * (weights**2).sum()))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The largest mu for which mu-GDP gives (epsilon, delta). T full-batch releases with noise sigma are sqrt(T)/sigma-GDP."""

    def tail(x: float) -> float:
        return math.erfc(x / math.sqrt(2)) / 2

    low, high = 1e-6, 100.0
    for _ in range(200):
        mu = (low + high) / 2
        spent = tail(epsilon / mu - mu / 2) - math.exp(epsilon) * tail(epsilon / mu + mu / 2)
        low, high = (mu, high) if spent <= delta else (low, mu)
    return low


def excess_risk(problem: Problem, *, repeats: int, seed: int = 0) -> tuple[Array, float]:
    """L(mean of W_t) - L(W_*) of `repeats` runs of RGP with the oracle's carriers; the share of gradients clipped."""
    rng = np.random.Generator(np.random.PCG64([seed, problem.n, problem.p, problem.d, problem.r]))
    p, d, r, lam = problem.p, problem.d, problem.r, problem.curvature
    L = np.linalg.qr(rng.standard_normal((p, r)))[0]
    R = np.linalg.qr(rng.standard_normal((d, r)))[0].T
    target = L @ rng.standard_normal((r, r)) @ R
    target *= DISTANCE / np.linalg.norm(target)
    noise, eta, scale = problem.noise, 1 / BETA, lam * d
    reach = np.sqrt((R**2).sum(0))  # |R e_j|, the length of feature j's part in the row space
    E = np.repeat(-target[None], repeats, 0)  # W - W_*
    mean, clipped = np.zeros_like(E), 0.0
    for _ in range(problem.T):
        # example j has x = sqrt(lambda d / 2) e_j: its gradient is lambda d E_j e_j^T, released as A_j and dR_j
        inside = L.T @ E
        outside = E - L @ inside
        norms = scale * np.sqrt((outside**2).sum(1) * reach**2 + (inside**2).sum(1))
        factors = np.minimum(1, CLIP / np.maximum(norms, 1e-300))
        clipped += float((factors < 1).mean()) / problem.T
        A = lam * (outside * factors[:, None]) @ R.T
        dR = lam * inside * factors[:, None]
        A += noise * rng.standard_normal(A.shape)
        dR += noise * rng.standard_normal(dR.shape)
        E = E - eta * ((A - L @ (L.T @ A)) @ R + L @ dR)
        mean += E / problem.T
    return lam / 2 * (mean**2).sum((1, 2)), clipped


@dataclass(frozen=True)
class Sweep:
    """A row of problems that differ in one thing, and the slope that the remark promises for it."""

    name: str
    label: str
    value: Callable[[Problem], float]
    promised: float
    points: Sequence[dict[str, Any]]


def sweeps(quick: bool) -> list[Sweep]:
    sizes = [512, 2048] if quick else [1024, 2048, 4096, 8192, 16384]
    budgets = [1.0, 4.0] if quick else [0.5, 1.0, 2.0, 4.0, 8.0]
    ranks = [1, 4] if quick else [1, 2, 4, 8]
    widths = [8, 32] if quick else [8, 16, 32, 64]
    return [
        Sweep("n", "n", lambda q: q.n, -1, [{"n": n} for n in sizes]),
        Sweep("epsilon", "epsilon", lambda q: q.epsilon, -1, [{"epsilon": e} for e in budgets]),
        Sweep("r", "r (p + d), by rank r", lambda q: q.k, 0.5, [{"r": r} for r in ranks]),
        Sweep("width", "r (p + d), by width p = d", lambda q: q.k, 0.5, [{"p": w, "d": w} for w in widths]),
    ]


SETTINGS: dict[str, dict[str, Any]] = {
    "hard, T balanced": {"spectrum": "hard", "steps": "balanced"},
    "hard, T of the remark": {"spectrum": "hard", "steps": "remark"},
    "easy, T of the remark": {"spectrum": "easy", "steps": "remark"},
}


def rate(*, quick: bool = False, say: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """Fitted slopes of the excess risk, for every sweep and setting."""
    base = Problem(n=512) if quick else Problem()
    repeats = 8 if quick else 16
    found = []
    for setting, choice in SETTINGS.items():
        for sweep in sweeps(quick):
            problems = [replace(base, **choice, **point) for point in sweep.points]
            rows, everything = [], []
            for problem in problems:
                runs, clipped = excess_risk(problem, repeats=repeats)
                everything.append(runs)
                rows.append(
                    {
                        "x": sweep.value(problem),
                        "excess_risk": float(runs.mean()),
                        "standard_error": float(runs.std(ddof=1) / math.sqrt(repeats)),
                        "T": problem.T,
                        "curvature": problem.curvature,
                        "clipped_share": clipped,
                        "over_bound": float(runs.mean()) / problem.bound,
                    }
                )
            slope, error = fit([row["x"] for row in rows], np.stack(everything))
            found.append(
                {
                    "setting": setting,
                    "sweep": sweep.name,
                    "label": sweep.label,
                    "promised_slope": sweep.promised,
                    "slope": slope,
                    "slope_standard_error": error,
                    "points": rows,
                }
            )
            say(f"{setting}: slope {slope:+.2f} against {sweep.label}, the remark's bound has {sweep.promised:+.1f}")
    return found


def fit(x: Sequence[float], runs: Array) -> tuple[float, float]:
    """Slope of log mean against log x, and its standard error by the jackknife over repetitions."""
    at, repeats = np.log(np.asarray(x, float)), runs.shape[1]

    def slope(which: Array) -> float:
        return float(np.polyfit(at, np.log(runs[:, which].mean(1)), 1)[0])

    left_out = [slope(np.arange(repeats) != i) for i in range(repeats)]
    spread = math.sqrt((repeats - 1) / repeats * sum((s - np.mean(left_out)) ** 2 for s in left_out))
    return slope(np.ones(repeats, bool)), spread


def study(*, quick: bool = False, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Both, as one JSON object."""
    return {
        "warning": f"{NOT_PRIVATE} The subspace is an oracle's; the data are made up here.",
        "covered_by_guarantee": False,
        "quick": quick,
        "proposition": proposition(),
        "rate": rate(quick=quick, say=say),
    }
