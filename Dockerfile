# GPU image: stock vLLM and Megatron-core with Transformer Engine on Hopper and Blackwell.
#   docker build -t megatron-dapo .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 megatron-dapo megatron-dapo doctor
#
# Versions, all here. tests/unit/install/test_pins.py compares them with setup.py.
# torch 2.13 is built for CUDA 13.0; vLLM pins torch, so torch goes first and vLLM decides it.
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
FROM ${CUDA_IMAGE}
ARG PYTHON_VERSION=3.12
ARG TORCH_VERSION=2.13.0
ARG VLLM_VERSION=0.32.0
ARG TRANSFORMER_ENGINE_VERSION=2.20.2
ARG MEGATRON_CORE_VERSION=0.16.1
ARG APEX_COMMIT=10417aceddd7d5d05d7cbf7b0fc2daad1105f8b4
ARG BUILD_JOBS=8

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        build-essential ca-certificates git ninja-build \
        python${PYTHON_VERSION} python${PYTHON_VERSION}-dev python${PYTHON_VERSION}-venv \
    && rm -rf /var/lib/apt/lists/*

# A constraint holds for every later pip: nothing may move these.
RUN python${PYTHON_VERSION} -m venv /opt/venv \
    && printf '%s\n' "torch==${TORCH_VERSION}" "vllm==${VLLM_VERSION}" \
        "transformer-engine==${TRANSFORMER_ENGINE_VERSION}" \
        "megatron-core==${MEGATRON_CORE_VERSION}" > /opt/constraints.txt
ENV PATH=/opt/venv/bin:${PATH} PIP_CONSTRAINT=/opt/constraints.txt

RUN pip install "torch==${TORCH_VERSION}" "setuptools>=78" wheel ninja pybind11
RUN pip install "vllm==${VLLM_VERSION}"
# The torch part of Transformer Engine is compiled; its default CUDA part is for CUDA 12.
RUN MAX_JOBS=${BUILD_JOBS} NVTE_FRAMEWORK=pytorch pip install --no-build-isolation \
        "transformer-engine[pytorch,core_cu13]==${TRANSFORMER_ENGINE_VERSION}"
# NVIDIA's apex by commit. The project of that name in the package index is unrelated.
RUN git clone --filter=blob:none https://github.com/NVIDIA/apex.git /opt/apex \
    && git -C /opt/apex checkout ${APEX_COMMIT} \
    && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 APEX_PARALLEL_BUILD=${BUILD_JOBS} \
        pip install --no-build-isolation /opt/apex \
    && rm -rf /opt/apex

WORKDIR /opt/megatron_dapo
COPY setup.py pyproject.toml ./
COPY megatron_dapo megatron_dapo
COPY examples examples
RUN pip install --no-build-isolation ".[gpu,tensorboard,wandb,report]"

LABEL torch=${TORCH_VERSION} vllm=${VLLM_VERSION} \
    transformer-engine=${TRANSFORMER_ENGINE_VERSION} megatron-core=${MEGATRON_CORE_VERSION} \
    apex=${APEX_COMMIT}
RUN useradd --create-home --uid 10001 trainer
USER trainer
ENV OMP_NUM_THREADS=1
RUN megatron-dapo doctor --no-gpu
CMD ["megatron-dapo", "--help"]
