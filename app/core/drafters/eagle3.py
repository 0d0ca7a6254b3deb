"""EAGLE-3 as its checkpoints describe it: SafeAI Lab's own, and those in the `speculators` format."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from app.core.config_values import Config, ConfigValues, TargetFacts
from app.core.drafters.config import (
    DrafterConfig,
    Shape,
    Tensors,
    attention_tensors,
    check_attention,
    check_made_for,
    check_width,
    checked_taps,
    layer_tensors,
    shape_of,
    values_of,
)
from app.core.errors import ModelUnavailable
from app.core.safe_files import DOWNLOAD_AGAIN, read_integers
from app.core.tokenizer_file import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(DrafterConfig):
    """One layer over pairs of a token and a state. The two kinds of norms before `fc` exclude one another:
    `norm_before_fc` over all taps joined, `fc_norm` for each tap. `norm_output`: the state fed back is the normed one.
    """

    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @classmethod
    def read(cls, config: Config, target_config: Config) -> Self:
        target = TargetFacts.read(target_config)
        values = values_of(config, "eagle_config")
        names = " ".join(map(str, (config.get("architectures"), config.get("speculators_model_type")))).lower()
        if "eagle" in names.replace("eagle3", "") and not ("eagle3" in names or values.get("draft_vocab_size")):
            raise ModelUnavailable("it is an EAGLE drafter of an older kind; choose an EAGLE-3 one")
        check_made_for(values, target)
        shape = shape_of(values, target)
        if shape["num_hidden_layers"] != 1:
            raise ModelUnavailable(f"it has {shape['num_hidden_layers']} layers, an EAGLE-3 drafter here has one")
        before_fc, each_tap = values.flag("norm_before_fc"), values.flag("fc_norm")
        if before_fc and each_tap:
            raise ModelUnavailable(f"its config.json sets norm_before_fc and fc_norm, which exclude; {DOWNLOAD_AGAIN}")
        return cls(
            **shape,
            taps=_eagle_taps(values, target),
            norm_before_residual=values.flag("norm_before_residual"),
            norm_before_fc=before_fc,
            fc_norm=each_tap,
            norm_output=values.flag("norm_output"),
        )

    def check(self, folder: Path, tensors: Tensors, target: Tokenizer) -> None:  # noqa: ARG002
        """It can run, and its vocabulary leads to the target's."""
        if self.norm_before_fc or self.fc_norm:
            raise ModelUnavailable("it norms the states before it joins them, which cannot run here")
        check_width(tensors, "fc.weight", (self.hidden_size, len(self.taps) * self.target_hidden_size))
        _check_draft_vocabulary(folder, tensors, self)

    def wanted(self, tensors: Tensors, target_config: Config) -> tuple[Tensors, Mapping[str, Shape]]:  # noqa: ARG002
        """The one layer, its head, and an embedding and a table of tokens where it brings them."""
        check_attention(self)
        own = {name.replace("layers.0.", "midlayer."): info for name, info in tensors.items() if name != "t2d"}
        hidden, rows = self.hidden_size, self.draft_vocab_size
        attention = attention_tensors(self, 2 * hidden, 1, bias=self.attention_bias, norms=False)
        layer = {**layer_tensors(attention, hidden, self.intermediate_size), "hidden_norm.weight": (hidden,)}
        wanted: dict[str, Shape] = {
            "fc.weight": (hidden, len(self.taps) * self.target_hidden_size),
            "norm.weight": (hidden,),
            "lm_head.weight": (rows, hidden),
            **{f"midlayer.{name}": shape for name, shape in layer.items()},
        }
        optional: dict[str, Shape] = {"embed_tokens.weight": (self.vocab_size, hidden), "d2t": (rows,)}
        return own, wanted | {name: shape for name, shape in optional.items() if name in own}


def _eagle_taps(values: ConfigValues, target: TargetFacts) -> tuple[int, ...]:
    """Published ids say before which layer the state is taken: one less is the layer that put it out."""
    told = values.layer_ids("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
    before = [2, target.layers // 2, target.layers - 3] if told is None else told
    return checked_taps([tap - 1 for tap in before], target)


def _check_draft_vocabulary(folder: Path, tensors: Tensors, config: Eagle3Config) -> None:
    """The head has a row for each draft token, and `d2t` leads from each to a token of the target."""
    rows, vocabulary = config.draft_vocab_size, config.vocab_size
    check_width(tensors, "lm_head.weight", (rows, config.hidden_size))
    if "embed_tokens.weight" in tensors:
        check_width(tensors, "embed_tokens.weight", (vocabulary, config.hidden_size))
    elif config.hidden_size != config.target_hidden_size:
        raise ModelUnavailable("it has no embedding of its own, and that of the main model has another width")
    if "t2d" in tensors and tensors["t2d"].shape != (vocabulary,):
        raise ModelUnavailable(f"its t2d is not a table of the main model's {vocabulary} tokens")
    if "d2t" not in tensors:
        if rows != vocabulary:
            raise ModelUnavailable(f"it has no table d2t from its {rows} tokens to the main model's; {DOWNLOAD_AGAIN}")
        return
    if tensors["d2t"].shape != (rows,):
        raise ModelUnavailable(f"its d2t is not a table of its {rows} tokens; {DOWNLOAD_AGAIN}")
    offsets = read_integers(folder, tensors["d2t"])
    if any(not 0 <= token + offset < vocabulary for token, offset in enumerate(offsets)):
        raise ModelUnavailable(f"its d2t leads beyond the main model's {vocabulary} tokens")
