# A store that speaks S3, for the tests of the containers; what it holds is gone with it.
ARG BASE=rlhf-orchestrator:test
# hadolint ignore=DL3006
FROM ${BASE}
USER 0
RUN pip --python /opt/venv/bin/python install --no-cache-dir -c constraints.txt "moto[s3]"
USER 1000
CMD ["moto_server", "-H", "0.0.0.0", "-p", "9000"]
