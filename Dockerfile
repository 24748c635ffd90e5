# One target per process: docker build --target relay|scheduler|operator|emulator .
#
# For images that can be built again bit by bit, give both bases by digest (--build-arg PYTHON=python@sha256:...) and
# SOURCE_DATE_EPOCH; the distributions are pinned by constraints.txt.
ARG PYTHON=python:3.12-slim-bookworm
ARG RUST=rust:1.95-slim-bookworm

# The wheel holds the Rust core for Python's stable ABI, so that any Python from 3.11 on can build it for all.
FROM ${RUST} AS wheel
ARG SOURCE_DATE_EPOCH
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /venv && /venv/bin/pip install --no-cache-dir "setuptools>=80" "setuptools-rust>=1.12"
WORKDIR /src
COPY pyproject.toml README.md ./
COPY core core
COPY protos protos
COPY operator operator
COPY relay relay
COPY scheduler scheduler
COPY sim sim
COPY cli cli
COPY client client
RUN /venv/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

# Installs one process's extra into /install, to be laid over /usr/local.
FROM ${PYTHON} AS install
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_COMPILE=1
COPY constraints.txt /
COPY --from=wheel /wheels /wheels
# Compiled here, since containers run with a read-only root; by hash, so that no time of day gets in.
RUN printf '%s\n' \
      '#!/bin/sh -e' \
      'pip install --prefix=/install --constraint=/constraints.txt "$(echo /wheels/*.whl)[$1]"' \
      'python -m compileall -q --invalidation-mode unchecked-hash -s /install -p /usr/local /install' \
      > /usr/local/bin/install-extra && chmod +x /usr/local/bin/install-extra

FROM install AS install-relay
RUN install-extra relay
FROM install AS install-scheduler
RUN install-extra scheduler
FROM install AS install-operator
RUN install-extra operator
FROM install AS install-emulator
RUN install-extra sim

FROM ${PYTHON} AS runtime
# Nothing in these containers installs anything.
RUN pip uninstall --yes --quiet --root-user-action=ignore setuptools wheel pip
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Numeric, so that runAsNonRoot can be checked; any other user will do as well.
USER 65532:65532
WORKDIR /

FROM runtime AS relay
COPY --from=install-relay /install /usr/local
ENTRYPOINT ["servingfleet-relay"]

FROM runtime AS scheduler
COPY --from=install-scheduler /install /usr/local
ENTRYPOINT ["servingfleet-scheduler"]

FROM runtime AS operator
COPY --from=install-operator /install /usr/local
# What the operator brings the cluster's CRD up to.
COPY crds/*.yaml /crds/
ENTRYPOINT ["servingfleet-operator"]

# For trials and tests without a GPU: `vllm serve ...`, with an emulated engine behind it.
FROM runtime AS emulator
COPY --from=install-emulator /install /usr/local
COPY --chmod=755 tests/cluster/images/vllm.py /usr/local/bin/vllm
ENTRYPOINT ["vllm"]
