# One node. Without a GPU:  docker build -t pipelinerl .
# With GPUs:                docker build -t pipelinerl --build-arg EXTRAS=gpu,redis,lora,data .
# An index of your own:     --build-arg PIP_EXTRA_INDEX_URL=…
FROM python:3.11-slim-bookworm
ARG EXTRAS=cpu,redis,lora,data,agents
ARG PIP_EXTRA_INDEX_URL
ENV PATH=/opt/pipelinerl/.venv/bin:$PATH
WORKDIR /opt/pipelinerl
COPY . .
RUN --mount=type=tmpfs,target=/var/lib/apt/lists apt-get update && apt-get install -y --no-install-recommends build-essential git redis-server
RUN PIP_NO_CACHE_DIR=1 python tools/install.py "$EXTRAS"
# Here, because a container that may not write would compile at every start. Templates among the files are no Python.
RUN python -m compileall -q -j 0 .venv pipelinerl >/dev/null || true
WORKDIR /work
ENTRYPOINT ["pipelinerl"]
CMD ["--help"]
