"""The operations of a vision tower, foretold by its configuration: those that torch counts in transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2VLConfig, SiglipVisionConfig, SiglipVisionModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from prefillcli.models.image_processing import TowerShape


def counted(tower: Any, *given: Any, **named: Any) -> float:
    """The operations of a forward, as torch counts them."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        tower(*given, **named)
    return float(counter.get_total_flops())


@pytest.mark.parametrize("tiles", [1, 5])
def test_operations_of_tiles_are_those_that_torch_counts(tiles: int) -> None:
    config = SiglipVisionConfig(hidden_size=384, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=6)
    config.patch_size, config.image_size = 14, 224
    config._attn_implementation = "eager"
    with torch.device("meta"):
        tower, pixels = SiglipVisionModel(config), torch.empty(tiles, 3, 224, 224)
    found = TowerShape.of(config).operations(pixels)
    assert found == pytest.approx(counted(tower, pixels), rel=0.1)


def patches(height: int, width: int, numbers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixel values of one image of so many patches, and their grid."""
    return torch.zeros(height * width, numbers), torch.tensor([[1, height, width]])


def test_operations_of_patches_of_one_image_are_those_that_torch_counts() -> None:
    config = Qwen2VLConfig().vision_config
    config.depth, config.embed_dim, config.num_heads, config.hidden_size = 4, 256, 4, 128
    config._attn_implementation = "eager"
    pixels, grid = patches(24, 32, 3 * 2 * 14 * 14)
    found = TowerShape.of(config).operations(pixels)
    tower = Qwen2VisionTransformerPretrainedModel(config)
    assert found == pytest.approx(counted(tower, pixels, grid_thw=grid), rel=0.15)


def test_layers_that_attend_in_windows_take_less() -> None:
    config = Qwen2_5_VLVisionConfig(
        depth=4, hidden_size=256, intermediate_size=684, num_heads=4, out_hidden_size=128, fullatt_block_indexes=[3]
    )
    config._attn_implementation = "eager"
    pixels, grid = patches(48, 48, 3 * 2 * 14 * 14)
    found = TowerShape.of(config).operations(pixels)
    tower = Qwen2_5_VisionTransformerPretrainedModel(config)
    assert found == pytest.approx(counted(tower, pixels, grid_thw=grid), rel=0.15)
