"""CaptionModel: captions of images by any image-to-text model of transformers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from lightning_aigc.data.captions.captions import clean_caption
from lightning_aigc.errors import ModelError

CHAT_PROMPT = (
    "Describe this image in one sentence for the training of a text-to-image model: the subject, its colours, its pose,"
    " the background and the light. Answer with the sentence alone."
)
TASK_PROMPT = "<DETAILED_CAPTION>"
"""The task of Florence-2, which takes a task's name as its prompt."""
TASK_MODELS = ("florence2",)
QUOTES = "\"'“”«» "
THOUGHTS = re.compile(r"<think>.*?(</think>|$)", re.DOTALL)
"""Text of a reasoning model before its answer."""


class CaptionModel:
    """An image-to-text model with its processor, loaded once.

    Args:
        name: A hub id or a folder.
        prompt: The instruction of a chat model, the beginning of each caption for models such as BLIP, or Florence-2's
            task; None takes `CHAT_PROMPT`, nothing, or `TASK_PROMPT`.
        device: The device of the model.
        max_new_tokens: The longest caption, in tokens.

    Raises: ModelError for a model that cannot be loaded or makes no text from images.
    """

    def __init__(self, name: str, prompt: str | None, device: torch.device, max_new_tokens: int) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        try:
            processor: Any = AutoProcessor.from_pretrained(name)
            model: Any = AutoModelForImageTextToText.from_pretrained(name, dtype=dtype)
        except Exception as error:  # transformers raises nearly anything for a folder of another kind
            raise ModelError(_not_loaded(name, error)) from error
        if not hasattr(processor, "image_processor") or not hasattr(processor, "tokenizer"):
            raise ModelError(f"--model {name} has no processor for images and text; give an image-to-text model")
        self.processor, self.model, self.device = processor, model.to(device).eval(), device
        self.max_new_tokens = max_new_tokens
        self.is_chat = getattr(processor, "chat_template", None) is not None
        if prompt is None:
            is_task = model.config.model_type in TASK_MODELS
            prompt = CHAT_PROMPT if self.is_chat else TASK_PROMPT if is_task else None
        self.prompt = prompt
        processor.tokenizer.padding_side = "left"  # an answer continues the prompt, which padding must not interrupt

    @torch.inference_mode()
    def captions(self, images: Sequence[Image.Image]) -> list[str]:
        """One caption for each image, on one line; an empty one where the model says nothing."""
        given = self._inputs(images).to(self.device, self.model.dtype)
        tokens_NT = self.model.generate(**given, max_new_tokens=self.max_new_tokens, do_sample=False)
        if self.is_chat and not self.model.config.is_encoder_decoder:
            tokens_NT = tokens_NT[:, given["input_ids"].shape[1] :]
        texts = self.processor.batch_decode(tokens_NT, skip_special_tokens=True)
        return [clean_caption(THOUGHTS.sub("", text)).strip(QUOTES) for text in texts]

    def _inputs(self, images: Sequence[Image.Image]) -> Any:
        """The processor's batch."""
        if self.is_chat:
            text = {"type": "text", "text": self.prompt}
            chats = [[{"role": "user", "content": [{"type": "image", "image": image}, text]}] for image in images]
            template = self.processor.apply_chat_template
            is_new = "processor_kwargs" in inspect.signature(template).parameters  # transformers 5
            padding: dict[str, Any] = {"processor_kwargs": {"padding": True}} if is_new else {"padding": True}
            return template(
                chats, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt", **padding
            )
        text_N = {} if self.prompt is None else {"text": [self.prompt] * len(images), "padding": True}
        return self.processor(images=list(images), return_tensors="pt", **text_N)


def _not_loaded(name: str, error: Exception) -> str:
    """The sentence for a model that cannot be loaded, without the hub's own text."""
    from huggingface_hub import is_offline_mode

    text = str(error)
    if "trust_remote_code" in text:
        reason = "its code lies with its weights and is not run; give a model that transformers has itself"
    elif isinstance(error, MemoryError):
        reason = "there is too little memory for it; give a smaller model"
    elif isinstance(error, ImportError):
        reason = f"a package that it needs is missing ({text.strip().splitlines()[0]})"
    elif isinstance(error, OSError) and is_offline_mode():
        reason = "HF_HUB_OFFLINE is set, and it is neither a folder nor in the hub's cache; unset it, or give a folder"
    elif isinstance(error, OSError):
        reason = "neither a folder of that name nor the hub has it; give the folder of a model that you downloaded"
    else:
        reason = "it is no image-to-text model of transformers; give one such as Salesforce/blip-image-captioning-large"
    return f"--model {name} cannot be loaded: {reason}"
