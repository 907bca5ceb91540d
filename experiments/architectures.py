"""Every architecture of Hugging Face's auto classes, tiny and random, in float64: are its per-example gradients exact?

    python experiments/architectures.py                    all of them, and the page docs/architectures.md
    python experiments/architectures.py --only swin,bert   some, printed
    python experiments/architectures.py --lora             the same with peft's LoRA on all linear layers, printed
    python experiments/architectures.py --results FILE     keep each result as a line of JSON, and leave out those that are there

Each is checked by rgp.check with RGP and with DP-SGD, against autograd one example at a time, in a process of its own with a
time limit. Models that cast to float32 on the way are kept in float64, or rounding would hide what is looked for.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import multiprocessing
import re
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

EXAMPLES, LENGTH, SIDE, WAVE = 3, 8, 32, 1600
PAGE = Path(__file__).parent.parent / "docs" / "architectures.md"
TASKS = {
    "text": ("SEQUENCE_CLASSIFICATION", "CAUSAL_LM", "MASKED_LM"),
    "text to text": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "image": ("IMAGE_CLASSIFICATION",),
    "audio": ("AUDIO_CLASSIFICATION", "CTC"),
}
MEANING = {
    "exact": "exact, with rules alone",
    "loop": "exact, some operations by the fallback",
    "alone": "exact, with one example at a time, to which the run changes by itself and says so",
    "refused": "refused: RGP says why",
    "mixes": "the model itself mixes examples (alone, an example has another loss), and `rgp.check` says that it is not exact",
    "wrong": "not exact",
    "crash": "an error that is not a refusal",
    "slow": "not done in time",
    "unbuilt": "no tiny model of it could be built by this script; not counted",
}
# sizes of a tiny model, by the names that configurations use
SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim", "d_embed", "hidden_dim"), 16
    ),
    **dict.fromkeys(("conv_dim", "rotary_dim", "expert_hidden_size", "attention_hidden_size", "projection_dim"), 16),
    **dict.fromkeys(("lm_dim", "decoder_hidden_size", "bottleneck_size", "classifier_proj_size", "d_inner"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 24),
    **dict.fromkeys(("feed_forward_size", "moe_intermediate_size", "shared_expert_intermediate_size", "d_kv_ff"), 24),
    **dict.fromkeys(("ffn_hidden_size", "mlp_dim", "expert_ffn_dim", "intermediate_size_mlp"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "num_blocks", "layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("decoder_attention_heads", "num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "v_head_dim", "qk_nope_head_dim", "d_head"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "kv_lora_rank", "q_lora_rank", "mamba_head_dim", "mamba_d_head"), 8),
    **dict.fromkeys(("state_size", "mamba_d_state", "time_step_rank", "mamba_dt_rank", "conv_kernel_size"), 4),
    **dict.fromkeys(("vocab_size", "n_vocab", "vocab_size_per_layer_input", "src_vocab_size", "tgt_vocab_size"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("n_ctx", "max_seq_len", "max_sequence_length"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "topk_group", "num_experts_per_token", "top_k"), 2),
    "image_size": SIDE,
    "patch_size": 8,
    "type_vocab_size": 2,
    "num_labels": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "window_size": 4,
    "pooler_hidden_size": 16,
    "sliding_window": 4,
    "attention_window": 4,
    "hidden_size_per_layer_input": 8,
    "first_k_dense_replace": 1,
}
DROPOUT = re.compile(r"drop(out|_path)?(_rate|_prob|_p)?$|dropout|layerdrop|drop_path")
LISTS: dict[str, list[Any]] = {
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [8, 16, 16, 16],
    "num_heads": [1, 2, 2, 2],
    "neck_hidden_sizes": [8, 16, 16],
    "embed_dims": [8, 16, 16, 16],
    "num_attention_heads": [1, 2, 2, 2],
    "conv_dim": [8, 8],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 8],
    "feature_layers": [1],
}
_SWIN = {"depths": [1, 1], "num_heads": [1, 2], "embed_dim": 8, "window_size": 4, "num_layers": 2}
_BAMBA = {"mamba_n_heads": 4, "mamba_n_groups": 2}
_HEADS = {"head_dim": 8, "num_key_value_heads": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OVERRIDES: dict[str, dict[str, Any]] = {  # where sizes by name do not fit together
    **dict.fromkeys(("SwinForImageClassification", "Swinv2ForImageClassification"), _SWIN),
    "DonutSwinForImageClassification": _SWIN,
    "BitForImageClassification": {"num_groups": 4},
    "LevitForImageClassification": {"image_size": 64, "patch_size": 16, "key_dim": [4, 4, 4], "drop_path_rate": 0},
    "CodeGenForCausalLM": {"n_head": 4, "rotary_dim": 4},
    "DeepseekV2ForSequenceClassification": {"num_experts_per_tok": 2, "n_routed_experts": 4, "topk_method": "greedy"},
    "EsmForSequenceClassification": {"vocab_size": 48},
    "Ernie4_5_MoeForCausalLM": {"moe_k": 2},
    "Mamba2ForCausalLM": {"num_heads": 4, "head_dim": 8, "n_groups": 2},
    **dict.fromkeys(("BambaForCausalLM", "GraniteMoeHybridForCausalLM"), _BAMBA),
    "FalconH1ForCausalLM": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 2},
    "GPTJForSequenceClassification": {"rotary_dim": 4},
    "ASTForAudioClassification": {"max_length": 24, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8},
    "CohereCompassTextForSequenceClassification": {"rope_parameters": {"full_attention": _ROPE}},
    "ConvBertForSequenceClassification": {"conv_kernel_size": 3},
    "NystromformerForSequenceClassification": {"conv_kernel_size": 3, "num_landmarks": 4, "segment_means_seq_len": 8},
    "Dots1ForCausalLM": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "LayoutLMv3ForSequenceClassification": {"coordinate_size": 2, "shape_size": 4, "visual_embed": False},
    "XmodForSequenceClassification": {"default_language": "en_XX"},
    "ReformerForSequenceClassification": {
        "axial_pos_embds": False,
        "lsh_attn_chunk_length": 4,
        "local_attn_chunk_length": 4,
        "hash_seed": 0,
    },
    "Gemma3nForCausalLM": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
    "EfficientNetForImageClassification": {
        "width_coefficient": 0.1,
        "depth_coefficient": 1.0,
        "num_block_repeats": [1] * 7,
        "hidden_dim": 128,
    },
    "HGNetV2ForImageClassification": {
        "stem_channels": [3, 8, 8],
        "stage_in_channels": [8, 16, 16, 16],
        "stage_mid_channels": [8] * 4,
        "stage_out_channels": [16] * 4,
        "stage_numb_of_layers": [2] * 4,
        "hidden_sizes": [16] * 4,
    },
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "LiltForSequenceClassification": {"hidden_size": 24, "channel_shrink_ratio": 2},
    "LongcatFlashForCausalLM": {
        "qk_head_dim": 16,
        "expert_ffn_hidden_size": 24,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "Mistral4ForSequenceClassification": {
        "rope_parameters": {**_ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64},
        "qk_head_dim": 16,
        "head_dim": 8,
    },
    "MobileViTV2ForImageClassification": {
        "image_size": 64,
        "patch_size": 2,
        "width_multiplier": 0.1,
        "conv_kernel_size": 3,
    },
    "NeoMMEForMaskedLM": {"head_dim": 16},
    "PerceiverForSequenceClassification": {
        "num_latents": 4,
        "d_latents": 16,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 2,
        "num_cross_attention_heads": 2,
    },
    "TextNetForImageClassification": {"stem_out_channels": 8, "image_size": 32, "hidden_sizes": [8, 8, 16, 16, 16]},
    "ZambaForSequenceClassification": {"attention_hidden_size": 32, "attention_head_dim": 16},
    "HunYuanDenseV1ForSequenceClassification": _HEADS,
    "HunYuanMoEV1ForSequenceClassification": _HEADS,
    "MinistralForSequenceClassification": _HEADS,
    "NemotronForSequenceClassification": _HEADS,
    "DbrxForCausalLM": {
        "attn_config.rope_theta": 10000.0,
        "attn_config.clip_qkv": 8.0,
        "attn_config.kv_n_heads": 2,
        "ffn_config.ffn_hidden_size": 24,
    },
    "GraniteSpeech5ForCTC": {"encoder_config.conv_kernel_size": 3, "encoder_config.context_size": 16},
    "T5GemmaForSequenceClassification": {"decoder.cross_attention_hidden_size": 16},
    "Zamba2ForSequenceClassification": {"mamba_headdim": 4, "attention_hidden_size": 32, "attention_head_dim": 16},
    "ParakeetForCTC": {"encoder_config.conv_kernel_size": 3, "encoder_config.subsampling_conv_channels": 8},
    "ShieldGemma2ForImageClassification": {"yes_token_index": 5, "no_token_index": 6},
    "xLSTMForCausalLM": {"embedding_dim": 16},
    "MiMoV2FlashForCausalLM": {**_HEADS, "num_key_value_heads": 1},
    "MusicgenForCausalLM": {"num_codebooks": 1},
    "MusicgenMelodyForCausalLM": {"num_codebooks": 1},
}
INSTEAD = {
    "Gemma3nForConditionalGeneration": "Gemma3nForCausalLM"
}  # the same without images, for which timm is missing


def architectures() -> dict[str, tuple[str, str]]:
    """Model type -> (kind of input, name of the class), the first task that it has."""
    from transformers.models.auto import modeling_auto

    found: dict[str, tuple[str, str]] = {}
    for kind, tasks in TASKS.items():
        for task in tasks:
            for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
                name = names[0] if isinstance(names, (tuple, list)) else names
                found.setdefault(model_type, (kind, INSTEAD.get(name, name)))
    return dict(sorted(found.items()))


def shrink(config: Any) -> None:
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            shrink(value)
        elif DROPOUT.search(name) and isinstance(value, float):
            setattr(config, name, 0.0)
        elif isinstance(value, (list, tuple)) and name in LISTS and value and isinstance(value[0], int):
            setattr(config, name, type(value)((LISTS[name] * 3)[: len(value)]))
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, min(value, SIZES[name]) if value else value)
    if isinstance(vars(config).get("layer_types"), list):
        n = getattr(config, "num_hidden_layers", 2)
        kinds = list(dict.fromkeys(config.layer_types))
        config.layer_types = (kinds * n)[:n]
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0
    if getattr(config, "is_encoder_decoder", False):
        config.decoder_start_token_id = 1
    for name in ("conv_dim", "conv_stride", "conv_kernel"):
        if isinstance(getattr(config, name, None), (list, tuple)) and hasattr(config, "num_feat_extract_layers"):
            setattr(config, name, LISTS[name])
            config.num_feat_extract_layers = 2


def _class_of(name: str) -> Any:
    import transformers

    return getattr(transformers, name)


def build(name: str) -> torch.nn.Module:
    kind = _class_of(name)
    config = kind.config_class()
    shrink(config)
    for option, value in OVERRIDES.get(name, {}).items():
        *parts, last = option.split(".")
        setattr(functools.reduce(getattr, parts, config), last, value)
    config.num_labels = 3
    config._experts_implementation = "eager"  # the grouped product has no float64
    torch.manual_seed(0)
    model = kind(config)
    for parameter in model.parameters():  # biases start at 0 and norms at 1: nothing may rest on that
        parameter.data.add_(0.05 * torch.randn(parameter.shape))
    return model.double().eval()


def inputs(kind: str, model: torch.nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if kind == "image" and model.main_input_name != "input_ids":  # ImageGPT takes colours as words
        config = model.config
        side = getattr(config, "image_size", SIDE)
        side = side if isinstance(side, int) else side[0]
        channels = getattr(config, "num_channels", 3)
        if config.model_type == "siglip2":  # takes images that are cut into patches already
            shape = (EXAMPLES, 16, channels * config.vision_config.patch_size**2)
            return {
                "pixel_values": torch.randn(shape, generator=generator, dtype=torch.float64),
                "pixel_attention_mask": torch.ones(EXAMPLES, 16, dtype=torch.int64),
                "spatial_shapes": torch.full((EXAMPLES, 2), 4),
            }
        return {"pixel_values": torch.randn(EXAMPLES, channels, side, side, generator=generator, dtype=torch.float64)}
    if kind == "audio" and hasattr(model.config, "num_mel_bins") and model.main_input_name != "input_features":
        shape = (EXAMPLES, model.config.max_length, model.config.num_mel_bins)
        return {model.main_input_name: torch.randn(shape, generator=generator, dtype=torch.float64)}
    width = _features(model.config)
    if kind == "audio" and model.main_input_name == "input_features" and width:
        shape = (EXAMPLES, 24, width)
        return {"input_features": torch.randn(shape, generator=generator, dtype=torch.float64)}
    if kind == "audio":
        return {model.main_input_name: torch.randn(EXAMPLES, WAVE, generator=generator, dtype=torch.float64)}
    ids = torch.randint(4, 40, (EXAMPLES, LENGTH), generator=generator)
    end = getattr(model.config, "eos_token_id", None)
    ids[:, -1] = end if isinstance(end, int) else 2  # which some classifiers look for
    return {"input_ids": ids, "decoder_input_ids": ids.flip(1)} if kind == "text to text" else {"input_ids": ids}


def _features(config: Any) -> int | None:
    """How many numbers a model of speech wants for each moment."""
    if config.model_type == "granite_speech5_ctc":  # four moments side by side
        return 4 * config.encoder_config.num_mel_bins
    for part in (config, getattr(config, "encoder_config", None)):
        for name in ("feature_projection_input_dim", "num_mel_bins", "input_dim"):
            if isinstance(getattr(part, name, None), int):
                return getattr(part, name)
    return None


class Doubled(TorchFunctionMode):
    """Keeps a model in float64 that casts to float32 on the way."""

    def __enter__(self):
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error):
        torch.set_default_dtype(self._before)
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double

        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        return func(*map(wide, args), **{k: wide(v) for k, v in (kwargs or {}).items()})


def loss(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    given = dict(batch)
    weight = given.pop("weight")
    options = {"use_cache": False} if "input_ids" in given else {}
    if model.config.model_type in ("reformer", "levit"):
        model.train()  # in evaluation mode they have no backward pass, or keep their biases; there is no dropout
    with Doubled():
        try:
            y = model(**given, **options)
        except TypeError:
            y = model(**given)
        y = y.logits if hasattr(y, "logits") else y[0]
        target = torch.linspace(-1, 1, y[0].numel(), dtype=y.dtype).view(y.shape[1:])
        return ((y.tanh() - target).square().flatten(1).sum(1) * weight).mean()


def with_lora(model: torch.nn.Module) -> torch.nn.Module:
    """peft's LoRA on all linear layers; its factors B, which begin at zero, are random."""
    import peft

    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear")).double()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_B" in name:
            parameter.data.add_(0.05 * torch.randn(parameter.shape))
    return model.eval()


def examine(kind: str, name: str, lora: bool = False) -> dict[str, Any]:
    import rgp

    warnings.simplefilter("ignore")
    try:
        model = build(name)
        model = rgp.fix(model, groups=2)
        if lora:
            model = with_lora(model)
        batch = {**inputs(kind, model), "weight": torch.linspace(0.5, 2, EXAMPLES, dtype=torch.float64)}
        plain = loss(copy.deepcopy(model), batch)  # which may keep something of it
        assert bool(plain.isfinite()) and plain.requires_grad, "the loss is not finite"
    except Exception as error:
        return {"verdict": "unbuilt", "why": _line(error)}
    found: dict[str, Any] = {"verdict": "exact", "worst": 0.0, "why": "", "parameters": len(trained_of(model))}
    for method in (rgp.DPSGD(), rgp.RGP(rank=2)):
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                result = rgp.check(model, batch, loss, method=method)
        except (rgp.UnsupportedError, rgp.WrongUseError) as error:
            return {**found, "verdict": "refused", "why": f"{type(method).__name__}: {_line(error)}"}
        except Exception as error:
            return {**found, "verdict": "crash", "why": f"{type(method).__name__}: {_line(error)} {_where()}"}
        found["worst"] = max(found["worst"], result.worst)
        looped = sorted({m.group(1) for w in caught if (m := re.match(r"(\S+) with parameter", str(w.message)))})
        if looped and found["verdict"] == "exact":
            found |= {"verdict": "loop", "why": ", ".join(looped)}
        if result.alone and result.ok:
            found |= {"verdict": "alone", "why": " ".join(result.alone.split())}
        if not result.ok:
            name, error = max(result.errors.items(), key=lambda item: item[1])
            verdict = "mixes" if mixes(model, batch) else "wrong"
            found |= {"verdict": verdict, "why": f"{type(method).__name__}: {name} by {error:.1e}"}
    return found


def mixes(model: torch.nn.Module, batch: dict[str, Tensor]) -> bool:
    """Whether the mean of the examples' losses alone is not the loss of the batch."""
    with torch.no_grad():
        alone = [loss(model, {name: x[i : i + 1] for name, x in batch.items()}) for i in range(EXAMPLES)]
        return not torch.allclose(torch.stack(alone).mean(), loss(model, batch), rtol=1e-9)


def trained_of(model: torch.nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _where() -> str:
    frame = traceback.extract_tb(sys.exc_info()[2])[-1]
    return f"({Path(frame.filename).name}:{frame.lineno})"


def _child(kind: str, name: str, lora: bool, pipe: Any) -> None:
    torch.set_num_threads(1)
    pipe.send(examine(kind, name, lora))


def with_limit(kind: str, name: str, seconds: float, lora: bool = False) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    with contextlib.suppress(Exception):  # imported here, what architectures share is imported once
        _class_of(name)
    process = context.Process(target=_child, args=(kind, name, lora, there), daemon=True)
    process.start()
    try:
        if here.poll(seconds):
            return here.recv()
        return {"verdict": "slow", "why": f"{seconds:.0f} s"}
    except EOFError:
        return {"verdict": "crash", "why": "the process died"}
    finally:
        process.kill()
        process.join()


def page(rows: list[dict[str, Any]]) -> str:
    import transformers

    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in MEANING}
    counted = sum(counts.values()) - counts["unbuilt"]
    lines = [
        "# Architectures",
        "",
        "Written by `python experiments/architectures.py`: every architecture of Hugging Face's auto classes "
        f"(transformers {transformers.__version__}, torch {torch.__version__}) as a tiny random model in float64, all of whose "
        "parameters are trained, with RGP and with DP-SGD, against autograd one example at a time. BatchNorm is replaced by "
        "`rgp.fix` first.",
        "",
        "| verdict | meaning | architectures |",
        "|---|---|---|",
        *(
            f"| {v} | {meaning} | {counts[v]}{f' of {counted}' if v != 'unbuilt' else ''} |"
            for v, meaning in MEANING.items()
        ),
        "",
        "| architecture | model | verdict | worst relative error | operations by the fallback, or the reason |",
        "|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (list(MEANING).index(row["verdict"]), row["type"])):
        worst = (
            f"{row['worst']:.0e}" if row.get("worst") and row["verdict"] in ("exact", "loop", "alone", "wrong") else ""
        )
        why = row.get("why", "").replace("|", "\\|").replace("`", "'")[:160]  # a cut may open code and not close it
        lines.append(f"| {row['type']} | {row['model']} | {row['verdict']} | {worst} | {why} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="model types, with commas between them")
    parser.add_argument("--lora", action="store_true", help="with peft's LoRA: only its factors are trained")
    parser.add_argument(
        "--results", type=Path, help="a file of JSON lines to add to; what it has already is not run again"
    )
    parser.add_argument("--seconds", type=float, default=120, help="time limit for one architecture")
    parser.add_argument("--page", type=Path, help=f"where to write the table; {PAGE.name} in docs/ if all are run")
    args = parser.parse_args()
    import transformers

    from rgp import checking, rules  # noqa: F401  (imported once, before processes are forked)

    if args.lora:
        import peft  # noqa: F401

    rules.load()
    transformers.logging.set_verbosity_error()
    known = architectures()
    only = args.only.split(",") if args.only else list(known)
    if unknown := [name for name in only if name not in known]:
        raise SystemExit(f"--only {unknown[0]}: no such model type; there are {', '.join(list(known)[:6])}, ...")
    done = {}
    if args.results is not None and args.results.exists():
        done = {row["type"]: row for row in map(json.loads, args.results.read_text().splitlines())}
    rows = [done[model_type] for model_type in only if model_type in done]
    for model_type in only:
        if model_type in done:
            continue
        kind, name = known[model_type]
        start = time.perf_counter()
        row = {"type": model_type, "model": name, **with_limit(kind, name, args.seconds, args.lora)}
        row["seconds"] = round(time.perf_counter() - start, 1)
        rows.append(row)
        print(f"{model_type:28} {row['verdict']:8} {row.get('why', '')[:200]}", flush=True)
        if args.results is not None:
            with args.results.open("a") as file:
                print(json.dumps(row), file=file)
    where = args.page or (None if args.only or args.lora else PAGE)
    if where is not None:
        where.write_text(page(rows))


if __name__ == "__main__":
    main()
