"""A model in several processes, run as a script in each of them: `python several.py FOLDER MESH WHAT [COORDINATOR COUNT ID]`.

Process 0 prints its results as JSON in the last line of stdout, the others follow."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, NamedTuple

TESTS = Path(__file__).parent
DEVICES = 8  # of all processes together
PROMPTS = [[5, 6, 7], [20], list(range(3, 90)), [50, 51, 52, 53], [33, 34], [9] * 70, [60, 61, 62], [40], [41, 42, 5, 6]]


class Run(NamedTuple):
    """A process of several."""

    process: subprocess.Popen
    said: IO[str]  # stderr
    told: IO[str]  # stdout

    def ended(self, seconds: float) -> int:
        """The exit status, once there is one; whoever does not end in time is killed."""
        try:
            return self.process.wait(seconds)
        finally:
            self.process.kill()
            self.process.wait()

    def words(self) -> str:
        self.said.seek(0)
        return self.said.read()

    def found(self):
        self.told.seek(0)
        return json.loads(self.told.read().splitlines()[-1])

    def await_line(self, line: str, seconds: float) -> None:
        """Until it has printed this line."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.process.poll() is None:
            self.told.seek(0)
            if line in self.told.read().splitlines():
                return
            time.sleep(0.05)
        raise AssertionError(f"there is no line {line!r}: {self.words()}")


def start(folder: Path, files: Path, mesh: str, what: str, port: int = 0, count: int = 1, number: int = 0) -> Run:
    """Starts one of `count` processes, whose output goes to `files`."""
    own = [f"127.0.0.1:{port}", str(count), str(number)] if count > 1 else []
    return start_line([sys.executable, str(TESTS / "several.py"), str(folder), mesh, what, *own], files, count, number)


def start_line(line: list[str], files: Path, count: int, number: int) -> Run:
    said, told = (open(files / f"{name}{count}.{number}", "w+") for name in ("said", "told"))  # noqa: SIM115 for the test
    simulated = f"--xla_force_host_platform_device_count={DEVICES // count}"
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    environment = {**os.environ, "XLA_FLAGS": " ".join([*flags, simulated]), "PYTHONUNBUFFERED": "1"}
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    process = subprocess.Popen(line, stdout=told, stderr=said, cwd=TESTS.parent, env=environment)
    return Run(process, said, told)


def answers(llm) -> dict:
    """A model's answers, one after the other: greedy and sampled prompts, a stream, an abandoned one, and logits."""
    from mla_jax import SamplingParams

    greedy = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
    sampled = SamplingParams(max_tokens=12, temperature=1.0, seed=7, logprobs=1, prompt_logprobs=1, logit_bias={7: 2.0})
    found = {"greedy": [output.token_ids for output in llm.generate(PROMPTS, greedy)]}
    chunks = llm.stream(PROMPTS[0], greedy)
    first = next(chunks)
    other = llm.generate(PROMPTS[3], greedy)[0].token_ids  # while the stream goes on
    found["stream"] = [first.token_ids, *[chunk.token_ids for chunk in chunks]]
    given_up = llm.stream(PROMPTS[2], greedy)
    next(given_up)
    given_up.close()
    outputs = llm.generate(PROMPTS, sampled)
    found |= {"other": other, "sampled": [output.token_ids for output in outputs]}
    found["texts"] = [
        output.text for output in llm.generate(PROMPTS[:2], SamplingParams(max_tokens=12, stop="d", temperature=0.0))
    ]
    found["prompt_logprobs"] = [[max(each.values()) for each in output.prompt_logprobs[1:]] for output in outputs]
    found["logits"] = llm.logits([[5, 6, 7], [8, 9, 10], [11, 12, 13]]).tolist()
    found["refused"] = refused(lambda: llm.generate([[5] * 500], greedy))
    found["again"] = [output.token_ids for output in llm.generate(PROMPTS, greedy)]
    stats = llm.stats()
    return found | {"cancelled": stats.running == stats.waiting == 0, "hits": stats.hits}


def refused(ask) -> str:
    from mla_jax.base.errors import MlaJaxError

    try:
        ask()
    except MlaJaxError as error:
        return str(error)
    return ""


def endless(llm) -> dict:
    """Answers one prompt after the other until something happens."""
    from mla_jax import SamplingParams

    llm.generate(PROMPTS[:2], SamplingParams(max_tokens=4))
    print("running", flush=True)
    while True:
        llm.generate(PROMPTS, SamplingParams(max_tokens=100, ignore_eos=True))


def interrupted(llm) -> dict:
    """Ctrl-C in the middle of an answer, then another one."""
    from convert.programs import export
    from mla_jax import SamplingParams

    params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0.0)
    llm.generate(PROMPTS[:2], params)
    stopped = threading.Event()
    threading.Thread(target=press_ctrl_c, args=(stopped,), daemon=True).start()
    try:
        while True:
            llm.generate(PROMPTS, params)
    except KeyboardInterrupt:
        stopped.set()
        how = "interrupted"
    several = llm.options.processes.several
    alone = [refused(ask).splitlines()[0] for ask in (llm.trainable, lambda: export(llm, "nowhere"), llm.follow) if several]
    return {"how": how, "refused": alone, "tokens": [output.token_ids for output in llm.generate(PROMPTS[:2], params)]}


def press_ctrl_c(stopped: threading.Event, seconds: float = 20) -> None:
    """Again if nothing comes of it: Python drops an interrupt that comes while the garbage collector calls somebody."""
    time.sleep(0.1)
    while not stopped.is_set():
        os.kill(os.getpid(), signal.SIGINT)
        stopped.wait(seconds)


def counts(llm) -> dict:
    """The answers, and how often each expert was chosen, by the file."""
    from mla_jax import SamplingParams

    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0))
    chosen = json.loads(Path(llm.options.experts.routing_stats).read_text())
    has_copies = any(getattr(block.mlp, "places", None) is not None for block in llm.model.blocks())
    return {"tokens": [output.token_ids for output in outputs], "chosen": chosen, "has_copies": has_copies}


WHAT = {"answers": answers, "counts": counts, "drafts": answers, "endless": endless, "interrupted": interrupted}


def main(folder: str, mesh: str, what: str, *several: str) -> None:
    from mla_jax import LLM

    own = {}
    if several:
        own = {"coordinator": several[0], "processes": int(several[1]), "process_id": int(several[2])}
    if what == "counts":
        own["routing_stats"] = f"{folder}.counts{len(several)}.{mesh}{several[2:]}"
    if what == "drafts":
        own["draft"] = "mtp"
    llm = LLM(folder, mesh=mesh, context=256, **own)
    if several and int(several[2]):
        llm.follow()
        print("followed", flush=True)
    else:
        print(json.dumps(WHAT[what](llm)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
