"""Send a folder to the Hugging Face Hub, or say in one sentence why it could not be sent."""

from __future__ import annotations

import re
from pathlib import Path

from lightning_aigc.errors import ConfigError

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
REASONS = {
    401: "the token is not valid; log in again: hf auth login",
    403: "the token may not write there; make one with write access at {endpoint}/settings/tokens",
    404: "there is no such owner; give your own name or that of an organisation you belong to",
    409: "there is another repository of this name; give another name",
    413: "a file is too large for the hub",
    429: "too many requests; wait some minutes and give the same command",
}


def check_can_push(repository: str) -> None:
    """Raise ConfigError for a repository that is no `owner/name`, without a token, or where the hub is forbidden."""
    from huggingface_hub import constants, get_token

    if not REPOSITORY.fullmatch(repository):
        raise ConfigError(f"--push must be owner/name, got {repository!r}; give for example --push anna/zorp-mug")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("HF_HUB_OFFLINE is set, which forbids the hub; unset it, or leave out --push")
    if get_token() is None:
        raise ConfigError("there is no token for the hub; log in with `hf auth login`, or leave out --push")


def push(folder: Path, repository: str, *, is_public: bool) -> str:
    """Create the repository, private unless `is_public`, and upload the folder; returns the address of the page.

    A repository that exists keeps its visibility. Raises: ConfigError in one sentence.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        address = api.create_repo(repository, private=not is_public, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Files written by lightning export --to hub"
        )
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = REASONS.get(status, f"the hub answered {status}; try again later").format(endpoint=api.endpoint)
        raise ConfigError(f"{repository} could not be written: {reason}. {_kept(folder, repository)}") from error
    except Exception as error:  # of the HTTP library, whose package changes between versions of huggingface_hub
        kind = type(error).__name__
        reason = f"{api.endpoint} cannot be reached ({kind}); check the network and its proxy settings"
        raise ConfigError(f"{repository} could not be written: {reason}. {_kept(folder, repository)}") from error
    return str(address)


def _kept(folder: Path, repository: str) -> str:
    return f"The folder is complete; send it with: hf upload {repository} {folder}"
