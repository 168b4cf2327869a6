"""What is shown of the names that exporters give."""

import pytest

from edge_opt.base.words import shortened

PACKAGE = "transformers.models.gemma3.modeling_gemma3"
ROOT = f"litert_torch.exportable_module.Exportable/{PACKAGE}.Gemma3ForCausalLM_model/{PACKAGE}.Gemma3TextModel_model"
LAYERS = [f"{ROOT}/{PACKAGE}.Gemma3DecoderLayer_{n}/{PACKAGE}.Gemma3Attention_self_attn" for n in range(2)]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("logits", "logits"),
        (f"{LAYERS[0]};24", "...Gemma3DecoderLayer_0/Gemma3Attention_self_attn;24"),
        (
            f"{LAYERS[1]};;{LAYERS[0]};4",
            "...Gemma3TextModel_model/Gemma3DecoderLayer_1/Gemma3Attention_self_attn",
        ),
        ("model.layers.3.self_attn/add", "model.layers.3.self_attn/add"),
        ("x" * 100, "..." + "x" * 70),
        ("", ""),
    ],
)
def test_a_long_name_keeps_its_layer(name: str, shown: str) -> None:
    assert shortened(name) == shown
