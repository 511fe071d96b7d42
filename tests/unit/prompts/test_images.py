"""Rows with images to prompts: the tokens and positions are those of transformers' own processors."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from prefillcli.asking.batch_files import RequestBuilder
from prefillcli.images.image import FIRST_FEATURE
from prefillcli.images.numbers import FeatureNumbers
from prefillcli.images.reading import read_images
from prefillcli.models.image_processing import ImageProcessing
from prefillcli.models.multimodal import read_config
from prefillcli.models.open import load_tokenizer
from prefillcli.prompts.builder import PromptBuilder
from prefillcli.prompts.encoding import Encoder, token_texts
from prefillcli.prompts.images import ImagePlaces, PromptImages
from prefillcli.prompts.labels import Labels, parse_labels
from prefillcli.prompts.questions import typed
from prefillcli.prompts.settings import PromptSettings
from prefillcli.rows.records import ErrorCode, Prompt, RowBatch, RowError
from tests.unit.models.image_families import EACH_FAMILY, FAMILIES, load_whole, make_family, open_processor
from tests.unit.prompts.test_prompts import batch_of

SIZES = [(40, 30), (20, 90), (64, 64)]
QWEN = [name for name in FAMILIES if name.startswith(("qwen", "glm"))]


class Model:
    """A tiny model of a family, whose prompts both this program and transformers make."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = make_family(name, folder)
        self.config: Any = read_config(self.folder)
        self.processor = open_processor(self.folder)
        self.tokenizer = load_tokenizer(self.folder, embedded=400, trust_remote_code=False, said="")
        self.processing = ImageProcessing.open(self.folder, self.config)

    def builder(self, columns: Sequence[str], available: Sequence[str], **options: Any) -> PromptBuilder:
        return PromptBuilder(self.tokenizer, self.settings(columns, **options), tuple(available))

    def settings(self, columns: Sequence[str], **options: Any) -> PromptSettings:
        places = ImagePlaces(lambda: self.processing, FeatureNumbers())
        read = partial(read_images, root=str(self.folder), max_pixels=10**6)
        images = PromptImages(tuple(columns), read, places)
        given = {"max_length": 4000, "vocab_size": self.config.get_text_config().vocab_size, "images": images}
        return PromptSettings(**given | options)

    def build(
        self, batch: RowBatch, columns: Sequence[str] = (), **options: Any
    ) -> tuple[list[Prompt], dict[int, RowError]]:
        builder = self.builder(columns, tuple(batch.columns), **options)
        try:
            return builder.build(batch, Labels(self.tokenizer, typed(parse_labels("y,n"))))
        finally:
            builder.close()

    def prompt(self, columns: Sequence[str] = (), *, options: dict[str, Any] | None = None, **values: Any) -> Prompt:
        """The prompt of the only row, with these values by column."""
        prompts, errors = self.build(
            batch_of(**{name: [each] for name, each in values.items()}), columns, **options or {}
        )
        assert not errors
        return prompts[0]

    def expected(self, messages: Sequence[Any], images: Sequence[Image.Image]) -> dict[str, Any]:
        """What transformers' processor makes of messages with these images."""
        text = self.processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of transformers' own use of numpy
            given: dict[str, Any] = self.processor(
                text=[text], images=[list(images)] if images else None, return_tensors="pt", add_special_tokens=False
            )
        return given

    def ids(self, prompt: Prompt) -> list[int]:
        """A prompt's tokens, with the token of an image for each feature."""
        return np.where(prompt.tokens >= FIRST_FEATURE, self.config.image_token_id, prompt.tokens).tolist()


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


every_family = pytest.mark.parametrize("model", EACH_FAMILY, indirect=True)
of_smolvlm = pytest.mark.parametrize("model", ["smolvlm"], indirect=True)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def file_of(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def url_of(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(file_of(image)).decode()


IMAGE = {"type": "image"}


def said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@every_family
@pytest.mark.parametrize("count", [0, 1, 3])
def test_images_of_a_column_have_the_tokens_of_the_processor(model: Model, count: int) -> None:
    images = [picture(*size, seed) for seed, size in enumerate(SIZES[:count])]
    prompt = model.prompt(["photo"], prompt="Is it red?", photo=[file_of(each) for each in images])
    messages = [user(*[IMAGE] * count, said("Is it red?"))] if count else [{"role": "user", "content": "Is it red?"}]
    assert model.ids(prompt) == model.expected(messages, images)["input_ids"][0].tolist()
    assert [(each.image.width, each.image.height) for each in prompt.images] == SIZES[:count]
    features = prompt.tokens[prompt.tokens >= FIRST_FEATURE]
    assert features.tolist() == [each.first + k for each in prompt.images for k in range(each.features)]


@every_family
def test_images_of_chats_stand_where_their_parts_do(model: Model) -> None:
    one, other, third = (picture(*size, seed) for seed, size in enumerate(SIZES))
    (model.folder / "third.png").write_bytes(file_of(third))
    chat = [
        {"role": "system", "content": "Be short."},
        user(said("See "), {"type": "image_url", "image_url": {"url": url_of(one)}}, said(" this.")),
        {"role": "assistant", "content": "Yes."},
        user(
            {"type": "input_image", "image_url": url_of(other)}, said(" or "), {"type": "image", "path": "third.png"}
        ),
    ]
    shown = [
        chat[0],
        user(said("See "), IMAGE, said(" this.")),
        chat[2],
        user(IMAGE, said(" or "), IMAGE),
    ]
    prompt = model.prompt(messages=chat)
    assert model.ids(prompt) == model.expected(shown, [one, other, third])["input_ids"][0].tolist()


@pytest.mark.parametrize("model", QWEN, indirect=True)
@pytest.mark.parametrize("count", [1, 3])
def test_positions_are_those_of_the_models_own_index(model: Model, count: int) -> None:
    images = [picture(*size, seed) for seed, size in enumerate(SIZES[:count])]
    parts = [part for at in range(count) for part in (said(f"number {at} "), {"type": "image", "image": at})]
    chat = [user(*({**part, "image": file_of(images[part["image"]])} if "image" in part else part for part in parts))]
    prompt = model.prompt(messages=chat)
    given = model.expected([user(*(IMAGE if "image" in part else part for part in parts))], images)
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")
    whole: Any = load_whole(model.folder)
    with torch.no_grad():
        expected, _ = whole.model.get_rope_index(**{name: given[name] for name in names if name in given})
    assert prompt.positions is not None
    assert prompt.positions.dtype == np.int32
    found = np.repeat(prompt.positions[None], 3, axis=0)
    for each in prompt.images:
        layout = model.processing.layout(each.image.width, each.image.height, each.several)
        own = (prompt.tokens >= each.first) & (prompt.tokens < each.first + each.features)
        assert layout.offsets is not None
        found[:, own] += layout.offsets
    assert (found == expected[:, 0].numpy()).all()


@pytest.mark.parametrize("model", QWEN, indirect=True)
def test_prompts_without_images_count_their_positions(model: Model) -> None:
    assert model.prompt(["photo"], prompt="Is it red?", photo=None).positions is None


@of_smolvlm
def test_columns_stand_in_the_order_of_the_options(model: Model) -> None:
    front, back = picture(40, 30), picture(20, 90)
    values: dict[str, Any] = {"prompt": "Same?", "front": file_of(front), "back": [url_of(back), url_of(front)]}
    prompt = model.prompt(["back", "front"], **values)
    shown = [user(IMAGE, IMAGE, IMAGE, said("Same?"))]
    assert model.ids(prompt) == model.expected(shown, [back, front, front])["input_ids"][0].tolist()
    assert [each.image.data for each in prompt.images] == [file_of(each) for each in (back, front, front)]
    assert prompt.images[1].first == prompt.images[2].first != prompt.images[0].first


@of_smolvlm
def test_images_of_columns_fill_the_places_of_a_chat_or_begin_its_last_question(model: Model) -> None:
    first, second = picture(40, 30), picture(20, 90)
    files = [file_of(first), file_of(second)]
    chat = [user(said("A "), IMAGE, said(" and "), IMAGE)]
    prompt = model.prompt(["photos"], messages=chat, photos=files)
    assert model.ids(prompt) == model.expected(chat, [first, second])["input_ids"][0].tolist()
    chat = [user(said("Hello")), {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Which?"}]
    prompt = model.prompt(["photos"], messages=chat, photos=files)
    shown = [*chat[:2], user(IMAGE, IMAGE, said("Which?"))]
    assert model.ids(prompt) == model.expected(shown, [first, second])["input_ids"][0].tolist()


@of_smolvlm
def test_equal_images_have_equal_numbers_and_others_have_others(model: Model) -> None:
    red, blue = file_of(picture(40, 30, 1)), file_of(picture(40, 30, 2))
    prompts, errors = model.build(batch_of(prompt=["a", "b", "c"], photo=[red, blue, red]), ["photo"])
    assert not errors
    firsts = [each.images[0].first for each in prompts]
    assert firsts[0] == firsts[2] != firsts[1]
    assert abs(firsts[0] - firsts[1]) >= prompts[0].images[0].features
    assert len({each.content for each in prompts}) == 3
    other = model.build(batch_of(prompt=["a", "a"], photo=[blue, red]), ["photo"])[0]
    assert other[0].content != prompts[0].content == other[1].content
    assert [each.images[0].first for each in other] == firsts[1::-1]  # in another job, too


@every_family
def test_the_text_of_a_placeholder_in_the_data_stays_text(model: Model) -> None:
    written, image = model.processing.written, picture(40, 30)
    prompt = model.prompt(["photo"], prompt=f"What is {written}?", photo=file_of(image))
    plain = model.prompt(["photo"], prompt="What is ?", photo=file_of(image))
    assert len(prompt.images) == 1
    assert (prompt.tokens >= FIRST_FEATURE).sum() == (plain.tokens >= FIRST_FEATURE).sum()
    shown = model.tokenizer.decode([token for token in prompt.tokens.tolist() if token < FIRST_FEATURE])
    assert f"What is {written}?" in shown
    without = model.prompt(["photo"], prompt=f"What is {written}?", photo=None)
    assert model.processing.placeholder not in without.tokens
    prompts, errors = model.build(
        batch_of(prompt=[f"What is {written}?"], photo=[file_of(image)]), ["photo"], literal=False
    )
    assert not prompts
    assert errors[0].code is ErrorCode.CHAT_ERROR
    assert errors[0].detail == "the prompt has 2 places for an image, and the row has 1 image"


@of_smolvlm
def test_rows_whose_images_cannot_be_read_are_errors_and_no_others(model: Model) -> None:
    good, chat = file_of(picture(40, 30)), [user(said("?"), {"type": "image", "path": "../secret.png"})]
    prompts, errors = model.build(
        batch_of(prompt=["a", "b", "c", "d"], photo=[b"no image", good, [good, good[:50]], "missing.png"]), ["photo"]
    )
    assert [prompt.row for prompt in prompts] == [1]
    assert {error.code for error in errors.values()} == {ErrorCode.INVALID_IMAGE}
    assert errors[0].detail.startswith("column photo: ")
    assert "image 2 of 2" in errors[2].detail
    _, errors = model.build(batch_of(messages=[chat, [user(IMAGE, said("?"))], [user(said("?"))]]))
    assert {row: error.code for row, error in errors.items()} == dict.fromkeys((0, 1), ErrorCode.INVALID_IMAGE)
    assert errors[0].detail.startswith("message 1: ")


@of_smolvlm
def test_a_chat_template_that_writes_no_place_for_an_image_is_an_error(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    monkeypatch.setattr(model.tokenizer, "chat_template", template)
    prompts, errors = model.build(batch_of(prompt=["a"], photo=[file_of(picture(40, 30))]), ["photo"])
    assert not prompts
    assert errors[0] == (ErrorCode.CHAT_ERROR, "the prompt has no place for an image, and the row has 1 image")


# Those of SmolVLM and LLaVA-OneVision on the hub, which read lists of parts alone.
SMOLVLM = (
    "<bos>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
ONEVISION = (
    "{% for message in messages %}{{'<bos>' + message['role'] + ' '}}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ '\n' + content['text'] }}"
    "{% endfor %}{{'<eos>'}}{% endfor %}{% if add_generation_prompt %}{{ '<bos>assistant\n' }}{% endif %}"
)


@of_smolvlm
@pytest.mark.parametrize("template", [SMOLVLM, ONEVISION])
def test_templates_that_read_parts_alone_lose_no_text(
    model: Model, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = picture(40, 30)
    monkeypatch.setattr(model.tokenizer, "chat_template", template)
    monkeypatch.setattr(model.processor.tokenizer, "chat_template", template)
    batch = batch_of(prompt=["Is it red?", "Is it?"], photo=[file_of(image), None])
    (seen, unseen), errors = model.build(batch, ["photo"], system="Be short.")
    assert not errors
    system = {"role": "system", "content": [said("Be short.")]}
    expected = model.expected([system, user(IMAGE, said("Is it red?"))], [image])
    assert model.ids(seen) == expected["input_ids"][0].tolist()
    assert model.ids(unseen) == model.expected([system, user(said("Is it?"))], [])["input_ids"][0].tolist()


@of_smolvlm
def test_without_a_chat_template_images_stand_before_the_text(model: Model) -> None:
    image = picture(40, 30)
    prompt = model.prompt(["photo"], prompt="A photo of", photo=[file_of(image)] * 2, options={"chat": False})
    given = model.processor(text=["<image><image>A photo of"], images=[[image, image]], return_tensors="pt")
    assert model.ids(prompt) == given["input_ids"][0].tolist()


@every_family
@pytest.mark.parametrize("on_long", ["truncate-left", "truncate-right", "truncate-middle"])
def test_the_text_of_a_long_prompt_is_cut_and_never_its_images(model: Model, on_long: str) -> None:
    file, text = file_of(picture(40, 30)), "".join(f"{number} " for number in range(100))
    short = model.prompt(["photo"], prompt="0", photo=file)
    limit = len(short.tokens) + 50
    prompt = model.prompt(["photo"], prompt=text, photo=file, options={"max_length": limit, "on_long": on_long})
    assert prompt.truncated
    assert limit - 5 <= len(prompt.tokens) <= limit
    assert (prompt.tokens >= FIRST_FEATURE).sum() == short.images[0].features
    kept = Encoder(model.tokenizer).decode(prompt.tokens)
    assert ("0 1 2 " in kept, "98 99" in kept) == {
        "truncate-left": (False, True),
        "truncate-right": (True, False),
        "truncate-middle": (True, True),
    }[on_long]


@of_smolvlm
@pytest.mark.parametrize("on_long", ["error", "skip", "truncate-left"])
def test_images_that_alone_are_too_long_are_named_with_their_tokens(model: Model, on_long: str) -> None:
    file = file_of(picture(40, 30))
    whole = model.prompt(["photo"], prompt="Is it?", photo=file)
    of_image = len(whole.tokens) - len(model.prompt(["photo"], prompt="Is it?", photo=None).tokens)
    options = {"max_length": of_image - 1, "on_long": on_long}
    _, errors = model.build(batch_of(prompt=["Is it?"], photo=[file]), ["photo"], **options)
    code = ErrorCode.SKIPPED_TOO_LONG if on_long == "skip" else ErrorCode.PROMPT_TOO_LONG
    size = len(whole.tokens)
    assert errors[0] == (code, f"{size} tokens, {of_image} of them of images; the limit is {of_image - 1}")


@every_family
def test_prompts_with_images_are_shown_as_text(model: Model) -> None:
    prompt = model.prompt(["photo"], prompt="Is it?", photo=[file_of(picture(40, 30)), file_of(picture(64, 64))])
    encoder = Encoder(model.tokenizer)
    text = encoder.decode(prompt.tokens)
    assert "Is it?" in text
    assert encoder.image in text
    texts = token_texts(encoder.decode, prompt.tokens.tolist())
    assert len(texts) == len(prompt.tokens)
    assert "".join(texts) == text


@of_smolvlm
def test_a_question_may_be_about_an_image_alone(model: Model) -> None:
    image = picture(40, 30)
    options = {"question": "\n\nIs it red?", "prompt_column": "photo"}
    prompt = model.prompt(["photo"], photo=file_of(image), options=options)
    shown = [user(IMAGE, said("Is it red?"))]
    assert model.ids(prompt) == model.expected(shown, [image])["input_ids"][0].tolist()
    prompts, errors = model.build(batch_of(photo=[None, file_of(image)]), ["photo"], **options)
    assert [prompt.row for prompt in prompts] == [1]
    assert errors[0].code is ErrorCode.EMPTY_PROMPT


LINE = {"model": "m", "max_tokens": 1, "temperature": 0}


@of_smolvlm
def test_chats_of_batch_files_have_their_images(model: Model) -> None:
    image = picture(40, 30)
    part = {"type": "image_url", "image_url": {"url": url_of(image), "detail": "high"}}
    bodies = [
        LINE | {"messages": [user(said("Is this "), part, said(" red?"))]},
        LINE | {"messages": [{"role": "user", "content": "Is it?"}]},
        LINE | {"messages": [user({"type": "image_url", "image_url": {"url": "a.png"}})]},
        LINE | {"messages": [user({"type": "input_audio"}, part)]},
    ]
    count = len(bodies)
    batch = batch_of(method=["POST"] * count, url=["/v1/chat/completions"] * count, body=bodies)
    builder = RequestBuilder(model.tokenizer, model.settings(()), models=["m"], answers=True)
    try:
        prompts, errors = builder.build(batch, Labels(model.tokenizer, typed(parse_labels("y,n"))))
    finally:
        builder.close()
    shown = [user(said("Is this "), IMAGE, said(" red?"))]
    assert [prompt.row for prompt in prompts] == [0, 1]
    assert model.ids(prompts[0]) == model.expected(shown, [image])["input_ids"][0].tolist()
    assert not prompts[1].images
    assert errors[2].code is ErrorCode.INVALID_IMAGE
    assert errors[3] == (ErrorCode.INVALID_REQUEST, "message 1 has a part that is not text")
