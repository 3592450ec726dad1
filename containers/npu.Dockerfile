# Fine-tuning on Ascend NPUs. BASE_IMAGE has CANN and Python 3.11, with its digest. containers/README.md has the commands.
ARG BASE_IMAGE
# hadolint ignore=DL3006
FROM ${BASE_IMAGE}

ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    HOME=/cache \
    USER=trainer \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton

WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt constraints-kernels.txt ./
COPY configs configs
COPY kernels/lightning_aigc_kernels kernels/lightning_aigc_kernels
COPY lightning_aigc lightning_aigc
# The CPU build of torch: a CUDA build includes upstream Triton, which owns the same folder as triton-ascend.
RUN pip install --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt torch torchvision \
    && pip install -c constraints.txt -c constraints-kernels.txt '.[npu]'

RUN useradd --home-dir /cache --uid 10001 trainer \
    && mkdir /cache /work \
    && chown trainer /cache /work
USER 10001
WORKDIR /work
VOLUME ["/cache"]
ENTRYPOINT ["bash", "-c", "source /usr/local/Ascend/ascend-toolkit/set_env.sh && exec lightning \"$@\"", "lightning"]
CMD ["--help"]
