"""vLLM's scheduler with additions, in the engine's process, where alone the order of events is known.

It makes prefix caching exact and reports answers whole (docs/serving.md), tells how answers grow and how full the cache
is, and has every request of a LoRA run use the adapter. The engine gets one more command: the swap of the weights.
"""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus

from pipelinerl.weights.load.adapter_request import ADAPTER

PINNED = "pipelinerl_pinned"
"""Key of ``SamplingParams.extra_args``: the request's salt is the version that it names."""
WHOLE = "pipelinerl_whole"
"""Key of ``SamplingParams.extra_args``: report at the end only."""
NAME = "pipelinerl_name"
"""Key of ``SamplingParams.extra_args``: the client's name of the request."""
STARTS = "pipelinerl_version_starts"
"""Key of the parameters that come with a whole answer: ``[(weight version, index of its first token), …]``."""


@dataclass(slots=True)
class _Held:
    """Tokens that a request has sampled so far, with their data."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    starts: list[tuple[str, int]] = field(default_factory=list)
    prompt_logprobs: Any = None
    prefill_stats: Any = None
    routed_experts: list[np.ndarray] = field(default_factory=list)

    def add(self, output: EngineCoreOutput, version: str) -> None:
        if output.new_token_ids and (not self.starts or self.starts[-1][0] != version):
            self.starts.append((version, len(self.token_ids)))
        self.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
        if output.new_prompt_logprobs_tensors is not None:
            self.prompt_logprobs = output.new_prompt_logprobs_tensors
        if output.prefill_stats is not None:
            self.prefill_stats = output.prefill_stats
        if output.routed_experts is not None:
            self.routed_experts.append(output.routed_experts)

    def whole(self, last: EngineCoreOutput) -> EngineCoreOutput:
        """The last output with everything in it."""
        last.new_token_ids = self.token_ids
        last.new_prompt_logprobs_tensors = self.prompt_logprobs
        last.prefill_stats = self.prefill_stats
        last.kv_transfer_params = {STARTS: self.starts}
        if self.logprobs:
            ids = np.array(self.token_ids, dtype=np.int32)[:, None]
            values = np.array(self.logprobs, dtype=np.float32)[:, None]
            last.new_logprobs = LogprobsLists(ids, values, np.zeros(len(ids), dtype=np.int32))
        if self.routed_experts:
            last.routed_experts = np.concatenate(self.routed_experts)
        return last


class AnswerScheduler(AsyncScheduler):
    """See the module."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._version = "default"
        self._lives: list[range] = []
        """The versions of each life of the trainer, which makes some again after a restart. The newest life last."""
        self._held: dict[str, _Held] = {}
        self._finished = self._preempted = self._sampled = 0

    def under_way(self, prefix: str) -> tuple[int, list[tuple[str, int, bool]]]:
        """Tokens sampled so far by the server, and of every completion whose request has a name that begins so.

        Returns:
            The server's tokens, and for each completion the name, its tokens, and whether it waits for its turn.
        """
        named = ((_extra(request, NAME), request) for request in self.requests.values() if not request.is_finished())
        return self._sampled, [
            (name, request.num_output_tokens, request.status != RequestStatus.RUNNING)
            for name, request in named
            if isinstance(name, str) and name.startswith(prefix)
        ]

    def load(self) -> tuple[float, int, int, int, int]:
        """Share of the cache in use, requests that run and wait, and those that ended and were preempted so far."""
        # Not from vLLM's own statistics, which cost every step and are off.
        running, waiting = self.get_request_counts()
        return self.get_kv_cache_usage(), running, waiting, self._finished, self._preempted

    def _free_request(self, *args: Any, **kwargs: Any) -> Any:
        self._finished += 1
        return super()._free_request(*args, **kwargs)

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        self._preempted += 1
        super()._preempt_request(*args, **kwargs)

    def add_request(self, request: Request) -> None:
        if self.lora_config is not None:
            request.lora_request = ADAPTER
            _hash_again(request)
        if _marked(request, WHOLE):
            self._held.setdefault(request.request_id, _Held())
        super().add_request(request)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._held.pop(request.request_id, None)
        return finished

    def set_weight_version(self, version: str) -> None:
        """Takes the new weight version and restarts prefills. Called while the engine is paused between steps."""
        if version.isdecimal():
            number = int(version)
            if self._lives and number >= self._lives[-1].stop:
                self._lives[-1] = range(self._lives[-1].start, number + 1)
            else:
                self._lives.append(range(number, number + 1))
        self._version = version
        for request in [request for request in reversed(self.running) if _is_prefilling(request)]:
            self.running.remove(request)
            super()._preempt_request(request, time.monotonic(), drop_stale_output=True)
            self.prev_step_scheduled_req_ids.discard(request.request_id)

    def _get_local_prefix_cache_hit(self, request: Request) -> Any:
        self._salt(request)
        return super()._get_local_prefix_cache_hit(request)

    def _salt(self, request: Request) -> None:
        """Lets a prompt find only what the live version computed. After a swap it is salted again."""
        # A pinned request keeps its conversation's history, like a sequence in flight.
        version = request.cache_salt if _marked(request, PINNED) else self._version
        salt = salt_of(version, self._lives) if version is not None else None
        if request.num_output_tokens or request.cache_salt == salt:
            return
        request.cache_salt = salt
        _hash_again(request)

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        reports = super().update_from_output(*args, **kwargs)
        for client, report in list(reports.items()):
            report.outputs = [output for output in map(self._report, report.outputs) if output is not None]
            if not (report.outputs or report.scheduler_stats or report.finished_requests):
                del reports[client]
        return reports

    def _report(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        self._sampled += len(output.new_token_ids)
        held = self._held.get(output.request_id)
        if held is None:
            return output
        held.add(output, self._version)
        if output.finish_reason is None:
            return None
        del self._held[output.request_id]
        return held.whole(output)


def salt_of(version: str, lives: Sequence[range]) -> str:
    """Returns the salt of blocks that were computed under a version, when it came last.

    Args:
        lives: the versions of each life of the trainer, the newest life last.
    """
    # A trainer that restarted makes the versions after its checkpoint anew: they find nothing of their first time.
    if version.isdecimal():
        for life in range(len(lives) - 1, 0, -1):
            if int(version) in lives[life]:
                return f"{version}, {life}"
    return version


def _hash_again(request: Request) -> None:
    request.block_hashes = []
    request.update_block_hashes()


def _marked(request: Request, key: str) -> bool:
    return bool(_extra(request, key))


def _extra(request: Request, key: str) -> Any:
    params = request.sampling_params
    return params.extra_args.get(key) if params is not None and params.extra_args else None


def _is_prefilling(request: Request) -> bool:
    """Whether a request has sampled nothing and never restarted. One restart only, so that long prefills end too."""
    return not (request.num_output_tokens or request.num_preemptions or _marked(request, PINNED))


def swap_weights(core: EngineCoreProc, version: int) -> Future[tuple[float, float, str]]:
    """Swaps the weights after the step under way, labels them and goes on. One command, so that nothing is awaited.

    Returns:
        (milliseconds without a new step, milliseconds of the swap, reason of its failure or ""). After a failure the
        engine stays paused, because its weights are undefined.
    """
    began = time.monotonic()
    outcome: Future[tuple[float, float, str]] = Future()

    def swap(idle: Future[None] | None) -> None:
        idle_at, failure = time.monotonic(), ""
        try:
            if idle is not None:
                idle.result()
            core.collective_rpc("swap_weights", args=(version,))
            core.set_weight_version(str(version))
            core.resume_scheduler()
        except Exception as error:  # noqa: BLE001 — the front ends the server
            failure = f"{type(error).__name__}: {error}"
        ended = time.monotonic()
        core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))  # the loop waits for a message when idle
        outcome.set_result((1e3 * (ended - began), 1e3 * (ended - idle_at), failure))

    idle = core.pause_scheduler(mode="keep", clear_cache=False)
    if idle is None:
        swap(None)
    else:
        idle.add_done_callback(swap)
    return outcome


def _extend_engine_core() -> None:
    """Makes vLLM's engine core swap weights, tell the scheduler their version, and tell the front the load."""
    keep = EngineCore.set_weight_version

    def set_weight_version(core: EngineCore, weight_version: str) -> None:
        keep(core, weight_version)
        if isinstance(core.scheduler, AnswerScheduler):
            core.scheduler.set_weight_version(weight_version)
        if core.vllm_config.model_config.is_multimodal_model:
            core.scheduler.reset_encoder_cache()  # features of images that the old weights computed
            core.model_executor.reset_encoder_cache()

    EngineCore.set_weight_version = set_weight_version
    EngineCore.server_load = lambda core: core.scheduler.load()
    EngineCore.answers_under_way = lambda core, prefix: core.scheduler.under_way(prefix)
    EngineCoreProc.swap_weights = swap_weights


_extend_engine_core()
