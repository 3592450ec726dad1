"""Keys of an object store, passwords and tokens: in no file that a run leaves, and in no line that it prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.conftest import Said
from lightning_aigc.errors import ConfigError
from lightning_aigc.secrets import HIDDEN, redact, redact_text, refuse_hidden

SECRET = "SECRET-KEY-123"
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"storage_options": {"key": SECRET, "anon": False}}, {"key": HIDDEN, "anon": False}),
        ({"storage_options": {"client_kwargs": {"endpoint_url": "https://s3.example", "verify": SECRET}}},
         {"client_kwargs": {"endpoint_url": "https://s3.example", "verify": HIDDEN}}),
        ({"storage_options": None}, None),
        ({"api_key": SECRET}, HIDDEN),
        ({"hf_token": SECRET}, HIDDEN),
        ({"account_key": SECRET}, HIDDEN),
        ({"aws_secret_access_key": SECRET}, HIDDEN),
        ({"password": SECRET}, HIDDEN),
        ({"apiKey": SECRET}, HIDDEN),
        ({"X-Api-Key": SECRET}, HIDDEN),
        ({"aws-secret-access-key": SECRET}, HIDDEN),
        ({"credentials": {"user": SECRET, "pass": SECRET}}, {"user": HIDDEN, "pass": HIDDEN}),
        ({"passwords": [SECRET, 123]}, [HIDDEN, HIDDEN]),
        ({"fs_kwargs": {"key": SECRET}}, {"key": HIDDEN}),
        ({"extra_headers": {"x": SECRET}}, {"x": HIDDEN}),
        ({"tags": ["hf_" + 30 * "x"]}, [HIDDEN]),
        ({"keep_tokens": 2}, 2),
        ({"placeholder_token": "<cat>"}, "<cat>"),
        ({"trigger_word": "token"}, "token"),
        ({"prior_prompts": ["a secret: the key"]}, ["a secret: the key"]),
        ({"shards_dir": f"s3://user:{SECRET}@bucket/shards"}, f"s3://{HIDDEN}@bucket/shards"),
        ({"shards_dir": f"https://x.example/a?sv=1&sig={SECRET}&se=2"}, f"https://x.example/a?sv=1&sig={HIDDEN}&se=2"),
        ({"tracking_uri": f"http://me:{SECRET}@host:5000"}, f"http://{HIDDEN}@host:5000"),
        ({"tracking_uri": f"https://{SECRET}@host/p"}, f"https://{HIDDEN}@host/p"),
        ({"shards_dir": f"s3://KEY:{SECRET}/with/slashes@bucket/a"}, f"s3://{HIDDEN}@bucket/a"),
        ({"shards_dir": f"http://me:a@b{SECRET}@host:5000/x"}, f"http://{HIDDEN}@host:5000/x"),
        ({"shards_dir": f"https://h/x?access_token={SECRET}&a=1"}, f"https://h/x?access_token={HIDDEN}&a=1"),
        ({"shards_dir": "http://host:8080/images@2x.png"}, "http://host:8080/images@2x.png"),
    ],
)  # fmt: skip
def test_a_value_is_hidden_by_its_name_or_its_place_in_an_address(given: dict[str, Any], left: Any) -> None:
    assert redact(given) == {next(iter(given)): left}
    assert SECRET not in redact_text(f"cannot read {given.get('shards_dir', '')}")


@pytest.mark.parametrize(
    ("line", "left"),
    [
        (
            f"--data.init_args.storage_options.key={SECRET} is wrong",
            f"--data.init_args.storage_options.key={HIDDEN} is wrong",
        ),
        (f"got {{'storage_options': {{'key': '{SECRET}'}}, 'a': 1}}", f"got {{'storage_options': {HIDDEN}, 'a': 1}}"),
        (f"got {{'api_key': '{SECRET}', 'a': 1}}", f"got {{'api_key': '{HIDDEN}', 'a': 1}}"),
        ("data.init_args.storage_options.key: this copy", "data.init_args.storage_options.key: this copy"),
        (f"my bug, token=hf_{'a1' * 12}, again", f"my bug, token={HIDDEN}, again"),  # of two rules, once
        ("trigger_word=token and token: wanted", "trigger_word=token and token: wanted"),
    ],
)
def test_a_printed_line_hides_what_is_assigned_to_a_secret_name(line: str, left: str) -> None:
    assert redact_text(line) == left


def test_a_copy_without_a_value_is_refused_with_its_key() -> None:
    with pytest.raises(
        ConfigError, match=r"data.init_args.storage_options.key: .* --data.init_args.storage_options.key VALUE"
    ):
        refuse_hidden({"data": {"init_args": {"storage_options": {"key": HIDDEN}}}})


def test_no_file_and_no_line_of_a_run_holds_a_key(
    command: Callable[..., Said], quick_config: dict[str, Any], tmp_path: Path
) -> None:
    config = quick_config
    config["trainer"]["default_root_dir"] = str(tmp_path / "run")
    config["model"]["init_args"]["checkpointing_steps"] = 1
    (tmp_path / "encode.yaml").write_text(yaml.safe_dump(config))
    assert command("encode", "-c", tmp_path / "encode.yaml", "-o", tmp_path / "shards").code == 0
    options = {"auto_mkdir": False, "secret": SECRET}
    config["data"] = {
        "class_path": "EncodedImageData",
        "init_args": {"shards_dir": f"file://{tmp_path}/shards", "train_batch_size": 2, "storage_options": options,
                      "cache_dir": str(tmp_path / "cache")},
    }  # fmt: skip
    config["model"]["init_args"] |= {"preserve": None, "class_word": None}  # captions of shards are encoded already
    (tmp_path / "fit.yaml").write_text(yaml.safe_dump(config))
    said = command("fit", "-c", tmp_path / "fit.yaml")
    assert said.code == 0, said.err
    assert SECRET not in said.out + said.err
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"config.yaml", "report.json", "report.html"} <= {path.name for path in files}
    assert any("snapshots" in path.parts for path in files)
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []

    said = command("fit", "-c", tmp_path / "run" / "config.yaml")
    assert said.code != 0 and "data.init_args.storage_options.secret" in said.errors[0]
    config["model"]["init_args"]["max_train_steps"] = 3
    config["data"]["init_args"]["storage_options"]["secret"] = "rotated"
    (tmp_path / "fit.yaml").write_text(yaml.safe_dump(config))
    assert command("fit", "-c", tmp_path / "fit.yaml", "--resume").code == 0
