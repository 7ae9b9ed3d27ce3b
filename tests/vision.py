"""A tiny random vision-language model whose processor needs PIL only, and images for it."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

TEMPLATE = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.content is string -%}{{ m.content }}{%- else -%}"
    "{%- for part in m.content -%}{{ '<image>' if part.type == 'image' else part.text }}{%- endfor -%}"
    "{%- endif -%}{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
TILES = tuple(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7))
TAGS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *TILES)


def picture(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG file of random colours."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def tokenizer_with_images(folder: Path) -> Any:
    """A tokenizer of bytes and of ``<image>``, whose model, described in ``folder``, takes images there."""
    from pipelinerl.testing import byte_tokenizer

    tokenizer = byte_tokenizer(TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.name_or_path = str(folder)
    described = {"image_token_id": tokenizer.convert_tokens_to_ids("<image>")}
    (folder / "config.json").write_text(json.dumps(described))
    return tokenizer


def save_idefics3(folder: Path) -> Path:
    """Write an Idefics3 of 200,000 parameters. It cuts an image into tiles of 28 × 28 pixels and 4 tokens."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    from pipelinerl.tiny_model.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(["which colour is the square"], TAGS, 9)
    tokenizer.chat_template = TEMPLATE
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"model_type": "llama", "vocab_size": len(tokenizer), "num_key_value_heads": 2}
    config = Idefics3Config(
        vision_config=sizes | {"model_type": "idefics3_vision", "image_size": 28, "patch_size": 7},
        text_config=sizes | ends | text | {"max_position_embeddings": 2048},
        image_token_id=image_id,
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=2,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        lm = Idefics3ForConditionalGeneration(config)
        for parameter in lm.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.15)
    lm.save_pretrained(folder)
    images = Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_qwen2_5_vl(folder: Path) -> Path:
    """Write a whole random Qwen2.5-VL: with its tokenizer, and a processor that needs torchvision to be loaded."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    from pipelinerl.tiny_model.tokenizer import train_tokenizer

    marks = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    tokenizer = train_tokenizer(["which colour is the square"], marks, 9)
    tokenizer.chat_template = TEMPLATE.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
    config = AutoConfig.from_pretrained(save_descriptions(folder, "qwen2_5_vl"))
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    for name, mark in zip(names, marks, strict=True):
        setattr(config, name, tokenizer.convert_tokens_to_ids(mark))
    text = config.get_text_config()
    text.vocab_size = len(tokenizer)
    text.eos_token_id, text.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm = AutoModelForImageTextToText.from_config(config)
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_descriptions(folder: Path, model_type: str) -> Path:
    """Write the configuration and image processor of a small Qwen2.5-VL, Qwen3-VL or Gemma 3, without weights."""
    from transformers import AutoConfig
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    text = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 2048, "pad_token_id": 0}
    text |= {"bos_token_id": 1, "eos_token_id": 2}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
    vision: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 64}
    if model_type == "gemma3":
        vision = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
        vision |= {"image_size": 28, "patch_size": 7}
        fields: dict[str, Any] = {"mm_tokens_per_image": 4, "image_token_index": 290}
        processor: Any = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    else:
        text |= {"rope_parameters": rope}
        vision |= {"depth": 2, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [1], "window_size": 112}
        fields = {"image_token_id": 290, "video_token_id": 291, "vision_start_token_id": 292}
        patch = {"qwen2_5_vl": 14, "qwen3_vl": 16}[model_type]
        processor = Qwen2VLImageProcessorPil(patch_size=patch)
    AutoConfig.for_model(model_type, text_config=text, vision_config=vision, **fields).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@torch.no_grad()
def expected_logprobs(lm: Any, folder: Path, images: list[bytes], ids: list[int], spans: Any, first: int) -> Tensor:
    """log p of the tokens from ``first`` on, from transformers' parts alone. Only tokens in ``spans`` show an image."""
    from transformers import AutoImageProcessor

    opened = [Image.open(io.BytesIO(image)).convert("RGB") for image in images]
    seen = AutoImageProcessor.from_pretrained(folder)([opened], return_tensors="pt")
    seen = {name: tensor for name, tensor in seen.items() if name.startswith("pixel")}
    features = lm.model.get_image_features(**seen, return_dict=True).pooler_output.flatten(0, 1)
    states = lm.get_input_embeddings()(torch.tensor([ids]))
    places = [place for start, end in spans for place in range(start, end) if ids[place] == lm.config.image_token_id]
    assert len(places) == len(features)
    states[0, places] = features
    hidden = lm.model.text_model(inputs_embeds=states, use_cache=False)[0][0]
    return lm.lm_head(hidden)[first - 1 : -1].log_softmax(-1).gather(1, torch.tensor(ids[first:])[:, None])[:, 0]
