# Fine-tuning on NVIDIA cards. Torch's wheels include CUDA; the host gives the driver. containers/README.md has the commands.
ARG BASE_DIGEST
FROM python:3.11-slim-bookworm@${BASE_DIGEST}

ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    HOME=/cache \
    USER=trainer \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# Triton compiles the launcher of each kernel with a C compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY configs configs
COPY kernels/lightning_aigc_kernels kernels/lightning_aigc_kernels
COPY lightning_aigc lightning_aigc
RUN pip install -c constraints.txt '.[cuda]'

RUN useradd --home-dir /cache --uid 10001 trainer \
    && mkdir /cache /work \
    && chown trainer /cache /work
USER 10001
WORKDIR /work
VOLUME ["/cache"]
ENTRYPOINT ["lightning"]
CMD ["--help"]
