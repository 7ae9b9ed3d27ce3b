# One node. Without a GPU:  docker build -t pipelinerl .
# With GPUs:                docker build -t pipelinerl --build-arg EXTRAS=gpu,redis,lora,data .
# An index that has CPU builds of torch: --build-arg PIP_EXTRA_INDEX_URL=…
FROM python:3.11-slim-bookworm
ARG EXTRAS=cpu,redis,lora,data,agents
ARG PIP_EXTRA_INDEX_URL
WORKDIR /opt/pipelinerl
COPY . .
RUN --mount=type=tmpfs,target=/var/lib/apt/lists apt-get update && apt-get install -y --no-install-recommends build-essential git redis-server
# The lock is of the CPU environment. There torchvision, torchaudio and torchcodec may not load: see the Makefile.
RUN case "$EXTRAS" in *cpu*) lock="-c requirements.lock";; esac; pip install --no-cache-dir ${lock:-} ".[$EXTRAS]"
RUN case "$EXTRAS" in *cpu*) pip uninstall -y torchvision torchaudio torchcodec;; esac
WORKDIR /work
ENTRYPOINT ["pipelinerl"]
CMD ["--help"]
