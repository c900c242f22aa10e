# syntax=docker/dockerfile:1
# flame-train for rented machines: the wheel, kernels that are compiled ahead, a user without rights.
#
#     docker build -t flame-train .
#     docker run --rm --init --gpus all -v ./runs:/runs flame-train quickstart /runs/first
#
# CUDA's libraries come with the extra cuda13, so the smallest of NVIDIA's images for CUDA 13 will do. Its driver is
# version 580 or newer.
ARG BASE=nvidia/cuda:13.0.2-base-ubuntu24.04

FROM ${BASE} AS build
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY . /source
WORKDIR /source
RUN python3 -m venv /opt/flame-train \
    && python3 -m venv /tmp/build \
    && /tmp/build/bin/pip install --no-cache-dir build \
    && /tmp/build/bin/python -m build --wheel --outdir /tmp/wheels \
    && /opt/flame-train/bin/pip install --no-cache-dir "$(ls /tmp/wheels/flame_train-*.whl)[cuda13,gguf,remote,show]"
# Kernels of the usual runs for these compute capabilities; others are compiled at the first start, into /cache.
ARG ARCHITECTURES="80 86 89 90 120"
ARG MODELS="sdxl flux-dev zimage qwen-image krea2"
RUN /opt/flame-train/bin/python scripts/kernels_wheel.py /tmp/wheels --architectures ${ARCHITECTURES} --models ${MODELS} \
    && /opt/flame-train/bin/pip install --no-cache-dir --no-deps /tmp/wheels/flame_train_kernels-*.whl

FROM ${BASE}
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/flame-train /opt/flame-train
# The first user of most hosts has this number too, and so may use a folder that is mounted.
RUN if id ubuntu > /dev/null 2>&1; then userdel --remove ubuntu; fi \
    && useradd --create-home --uid 1000 flame \
    && mkdir --parents /models /data /runs /cache \
    && chown flame /models /data /runs /cache
ENV PATH=/opt/flame-train/bin:$PATH \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface
USER flame
WORKDIR /runs
VOLUME ["/models", "/data", "/runs", "/cache"]
EXPOSE 8675
ENTRYPOINT ["flame-train"]
CMD ["--help"]
