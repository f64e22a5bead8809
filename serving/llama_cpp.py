"""The engine process: llama.cpp's server on a port of the loopback address, until it is killed.

python -m serving.llama_cpp --model FILE --name NAME --port N --slots N --connections N
    --context-length N --threads N
"""

import argparse
import os
import signal
import threading


def main() -> None:
    """Serve until a signal ends the process."""
    import xllamacpp

    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "name"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "slots", "connections", "context-length", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias = options.model, {options.name}
    params.hostnames, params.port = ["127.0.0.1"], options.port
    params.api_keys = [os.environ["RLHF_ENGINE_KEY"]]
    params.n_parallel, params.n_ctx = options.slots, options.slots * options.context_length
    params.cpuparams.n_threads = options.threads
    # each request has a thread until it is answered
    params.n_threads_http = options.connections + 2
    # unless a request says otherwise, the distribution of the trained model, as in OpenAI's API
    params.sampling.temp = params.sampling.top_p = 1.0
    params.sampling.top_k, params.sampling.min_p = 0, 0.0
    # f16, and flash attention, change logits by up to 0.002, which decides near ties differently
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_ram_mib = 0  # by default prompts of earlier requests fill up to 8 GiB
    params.verbosity = -1
    server = xllamacpp.Server(params)  # noqa: F841 -- the server runs as long as the object lives
    signal.pause()


if __name__ == "__main__":
    threading.excepthook = lambda *_: os._exit(1)
    main()
