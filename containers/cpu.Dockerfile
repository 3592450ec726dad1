# Fine-tuning on CPUs, and the demo. containers/README.md has the commands that build and run it.
ARG BASE_DIGEST
FROM python:3.11-slim-bookworm@${BASE_DIGEST}

ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    HOME=/cache \
    USER=trainer \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface

WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY configs configs
COPY kernels/lightning_aigc_kernels kernels/lightning_aigc_kernels
COPY lightning_aigc lightning_aigc
# Torch for CPUs: the default wheels include CUDA, some gigabytes.
RUN pip install --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt torch torchvision \
    && pip install -c constraints.txt .

RUN useradd --home-dir /cache --uid 10001 trainer \
    && mkdir /cache /work \
    && chown trainer /cache /work
USER 10001
WORKDIR /work
VOLUME ["/cache"]
ENTRYPOINT ["lightning"]
CMD ["--help"]
