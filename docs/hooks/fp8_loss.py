"""Make tables of the results of `tests.benchmarks.fp8_loss`: what fp8 caches cost a model."""

from __future__ import annotations

from typing import Any

from markdown_tables import NONE, table

TEXTS = {
    ("prompts", "cache"): "prompts, every key read from the cache",
    ("windows", "steps"): "windows, in steps",
    ("windows", "cache"): "windows, every key read from the cache",
}
CACHES = {"latent in e4m3": "only the latent in e4m3"}  # other names are formats or dtypes


def _name(cache: str) -> str:
    return CACHES.get(cache, f"`{cache}`" if "_" in cache else cache)


def bits_table(report: dict[str, Any]) -> str:
    """Return the table of the bits per byte over each cache, and a text of the pieces and of the limit."""
    lines, exceeded = [], []
    for row in report["bits"]:
        text = TEXTS[row["text"], row["keys"]]
        for cache, bits in row["bits_per_byte"].items():
            found = [row["over"].get(base, {}).get(cache) for base in ("float32", "bfloat16")]
            if not any(found):
                continue
            increases = [
                f"{each['increase']:+.2%} (± {each['standard_error']:.2%})" if each else NONE for each in found
            ]
            nearest = found[1] or found[0]
            low, high = nearest["quartiles"]
            lines.append([text, row["model"], _name(cache), f"{bits:.4f}", *increases, f"{low:+.2%} to {high:+.2%}"])
            if cache == "fp8_e4m3" and found[1]["increase"] > report["limit"]:
                exceeded.append(f"{text}, model in {row['model']}")
    head = ["text", "model", "cache", "bits per byte", "over a float32 cache", "over a bfloat16 cache",
            "quartiles of the pieces"]  # fmt: skip
    pieces = {row["text"]: row for row in report["bits"]}
    prompts, windows = pieces["prompts"], pieces["windows"]
    said = (
        f"Text: {prompts['pieces']} prompts with {prompts['bytes']} bytes, and {windows['pieces']} windows of "
        f"{report['window']} bytes; steps of {report['step']} tokens. The number behind ± is the standard error of the "
        "increase over other text of this kind. The quartiles are those of the increases of single prompts or windows, "
        "over the bfloat16 cache if there is one in the row."
    )
    limit = f"{report['limit']:.0%}"
    verdict = (
        f"`fp8_e4m3` needs over {limit} more bits per byte than a bfloat16 cache here: {'; '.join(exceeded)}."
        if exceeded
        else f"`fp8_e4m3` needs at most {limit} more bits per byte than a bfloat16 cache in every row."
    )
    return f"{table(head, lines, 3)}\n\n{said}\n\n{verdict}"


def random_table(report: dict[str, Any]) -> str:
    """Return the table of the errors of random models: those over `fp8_ds_mla` divided by those over `fp8_e4m3`."""
    lines = [
        [f"x {row['rope_size']:g}", base, f"{row['errors'][base]['fp8_e4m3']:.1e}",
         f"{row['errors'][base]['fp8_ds_mla']:.1e}", f"{ratio['median']:.2f}",
         "{:.2f} to {:.2f}".format(*ratio["quartiles"])]
        for row in report["random_models"] for base, ratio in row["ratios"].items()
    ]  # fmt: skip
    head = ["rope keys", "compared with a cache in", "error, `fp8_e4m3`", "error, `fp8_ds_mla`",
            "`fp8_ds_mla` / `fp8_e4m3`", "quartiles"]  # fmt: skip
    said = f"Numbers are medians over {report['random_models'][0]['draws']} random models."
    return f"{table(head, lines, 2)}\n\n{said}"


def scores_table(report: dict[str, Any]) -> str:
    """Return the table of the standard deviations of the two products of a score, and of their errors, by layer."""
    lines = [
        [str(row["layer"]), f"{row['latent']:.2f}", f"{row['rope']:.2f}", f"{row['rope'] / row['latent']:.1f}",
         f"{row['latent_error']:.3f}", f"{row['rope_error']:.3f}"]
        for row in report["scores"]
    ]  # fmt: skip
    head = ["layer", "product with the latent", "product with the rope part", "rope / latent", "error, latent",
            "error, rope part"]  # fmt: skip
    return table(head, lines, 1)
