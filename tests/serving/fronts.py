"""A front in a process of its own, for tests to ask and to kill."""

import json
import subprocess
import sys
import time
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx
import psutil
from transformers import PreTrainedModel

from config.ports import free_port
from config.workspace.exported import Exported, gguf_path, keep_exported
from serving.settings import EngineName
from tests.conftest import ROOT
from tests.training.support.tiny import CONTEXT, tokenizer
from training.export.aligned import with_prompts_of_training
from training.export.gguf_file import write_gguf
from training.modeling.tokenizer import special_tokens

PROGRAM = """
import json, logging, sys
from pathlib import Path
from config.errors import RlhfError
from functools import partial
from config import jsonl
from config.workspace.served import SERVED
from serving import run
from serving.account import Account, Price
from serving.settings import Address, Challenger, Settings
root, engine = Path(sys.argv[1]), sys.argv[2]
port, slots, run.QUEUE = map(int, sys.argv[3:6])
keep_days, challenger, share, compares, page = json.loads(sys.argv[6]) if sys.argv[6:] else [None] * 5
other = Challenger(lambda: Path(challenger), share, compares) if challenger else None
wanted = lambda: Path((root / "wanted").read_text())
say = lambda line: print(line, flush=True)
account = Account(Price(3.6, "assistant"), partial(jsonl.append, root / SERVED))
arguments = ("--enforce-eager", "--dtype", "float32") if engine == "vllm" else ()
try:
    settings = Settings(engine, "f32", slots, 2, arguments)
    run.serve(root, Address(port), wanted, settings, account, say, keep_days, other, page)
except RlhfError as error:
    sys.exit(str(error))
"""


def made_export(
    folder: Path, model: PreTrainedModel, template: str | None = None, differs: tuple[str, ...] = ()
) -> Path:
    """An export of a model for single prompts, or for the chats of a template."""
    folder.mkdir()
    (folder / "gguf").mkdir()
    model.save_pretrained(folder)
    chat_tokenizer = deepcopy(tokenizer())  # it is shared by all tests, and this changes its chat template
    with_prompts_of_training(chat_tokenizer, is_plain=template is None)
    chat_tokenizer.chat_template = template or chat_tokenizer.chat_template
    chat_tokenizer.save_pretrained(folder)
    write_gguf(model, chat_tokenizer, "f32", gguf_path(folder, "f32"))
    record = Exported(
        context_length=CONTEXT,
        control_tokens=special_tokens(chat_tokenizer),
        single_prompts=template is None,
        differs=differs,
    )
    keep_exported(folder, record)
    return folder


class Served:
    """A running front, and a client of it."""

    def __init__(
        self,
        root: Path,
        export: Path,
        slots: int = 4,
        queue: int = 64,
        engine: EngineName = "llama_cpp",
        keep_days: float | None = None,
        challenger: Path | None = None,
        share: float = 0.5,
        compares: bool = False,
        page: bool = False,
    ) -> None:
        self.root, self.port = root, free_port()
        self.want(export)
        options = json.dumps([keep_days, challenger and str(challenger), share, compares, page])
        arguments = [root, engine, self.port, slots, queue, options]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *map(str, arguments)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.said = [self.process.stdout.readline() for _ in range(3 if page else 2)]
        self.key = (root / ".rlhf/serve.key").read_text()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {self.key}"}, timeout=60, trust_env=False
        )
        self.await_health()

    def want(self, export: Path) -> None:
        temporary = self.root / "wanted.new"
        temporary.write_text(str(export))
        temporary.rename(self.root / "wanted")

    def await_health(self, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if self.client.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.02)
        raise AssertionError("the front is not up")

    def ask(self, prompt: str, **settings: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, **settings}
        return self.client.post("/v1/chat/completions", json=body)

    def engines(self, command: str = "serving.llama_cpp") -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        result = []
        for child in children:
            with suppress(psutil.NoSuchProcess):  # ended, or a zombie that is not reaped yet
                if any(command in word for word in child.cmdline()):
                    result.append(child)
        return result

    def at_work(self) -> float:
        text = self.client.get("/metrics").text
        (line,) = [text_line for text_line in text.splitlines() if text_line.startswith("rlhf_requests_at_work ")]
        return float(line.split()[1])

    def end(self) -> int:
        self.client.close()
        self.process.terminate()
        code = self.process.wait(60)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        return code
