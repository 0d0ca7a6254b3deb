"""The multi-token head that Qwen3-Next, Qwen3.5 and the DeepSeek family are trained with, as checkpoints describe it:
in a folder of its own, or inside the main model's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TypeVar

from app.core.config_values import Config, ConfigValues, TargetFacts, text_part
from app.core.drafters.config import (
    FINAL,
    DrafterConfig,
    Shape,
    Tensors,
    attention_tensors,
    check_made_for,
    check_width,
    layer_tensors,
    shape_of,
)
from app.core.errors import ModelUnavailable
from app.core.tokenizer_file import Tokenizer

MTP_LAYOUTS = {"qwen3_next": "qwen", "qwen3_5": "qwen", "deepseek": "deepseek"}

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig(DrafterConfig):
    """The multi-token head of a target; what the drafter's config leaves out, the target's says.

    `layout` `qwen`: tensors `mtp.*`; `deepseek`: further decoder layers, the first with index `target_layers`.
    """

    layout: str
    model_type: str

    @classmethod
    def read(cls, config: Config, target_config: Config) -> Self:
        target = TargetFacts.read(target_config)
        own = ConfigValues(text_part(config))
        check_made_for(own, target)
        layout = next((found for name, found in MTP_LAYOUTS.items() if target.model_type.startswith(name)), "")
        if not layout:
            raise ModelUnavailable(f"the multi-token head of a {target.model_type or 'nameless'} model cannot run here")
        values = ConfigValues(text_part(config), text_part(target_config))
        layers = values.whole("mtp_num_hidden_layers", "num_nextn_predict_layers", default=1)
        return cls(
            **{**shape_of(values, target), "num_hidden_layers": layers},
            taps=(FINAL,),
            layout=layout,
            model_type=target.model_type,
        )

    def check(self, folder: Path, tensors: Tensors, target: Tokenizer) -> None:  # noqa: ARG002
        """Its projection joins an embedding and a state of the target's width."""
        name = next((name for name in tensors if name.endswith(("mtp.fc.weight", ".eh_proj.weight"))), "fc.weight")
        check_width(tensors, name, (self.hidden_size, 2 * self.hidden_size))

    def wanted(self, tensors: Tensors, target_config: Config) -> tuple[Tensors, Mapping[str, Shape]]:
        """A Qwen head's one layer has the sizes of the main model's, its experts are left alone; DeepSeek's is not
        looked at."""
        if self.layout != "qwen":
            return {}, {}
        mine = {f"mtp.{name.partition('mtp.')[2]}": info for name, info in tensors.items() if "mtp." in name}
        target = ConfigValues(text_part(target_config))
        hidden, heads = target.whole("hidden_size"), target.whole("num_attention_heads")
        sizes = replace(
            self,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=target.whole("num_key_value_heads", default=heads),
            head_dim=target.whole("head_dim", default=max(1, hidden // heads)),
        )
        attention = attention_tensors(sizes, hidden, 2, bias=target.flag("attention_bias"), norms=True)
        sparse = any(".experts" in name or ".switch_mlp" in name for name in mine)
        layer = layer_tensors(attention, hidden, 0 if sparse else target.whole("intermediate_size"))
        wanted: dict[str, Shape] = {
            "mtp.fc.weight": (hidden, 2 * hidden),
            **{f"mtp.{name}.weight": (hidden,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")},
            **{f"mtp.layers.0.{name}": shape for name, shape in layer.items()},
        }
        return {name: info for name, info in mine.items() if not (sparse and ".mlp." in name)}, wanted


def head_tensors(config: Config, tensors: Mapping[str, Value]) -> dict[str, Value]:
    """The multi-token head that lies inside a main model's checkpoint, by name; empty when there is none.

    Qwen calls its tensors `mtp.*`; DeepSeek adds layers behind the `num_hidden_layers` that the config counts.
    """
    text = text_part(config)
    prefix = f"model.layers.{text.get('num_hidden_layers')}."
    starts = (prefix, "mtp.") if text.get("num_nextn_predict_layers") else ("mtp.",)
    return {name: info for name, info in tensors.items() if name.startswith(starts) or ".mtp." in name}
