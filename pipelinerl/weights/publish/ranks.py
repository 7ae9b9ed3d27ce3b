"""The trainer's ranks as rank 0 sees them: where each serves its stripe, and what it says about it."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.protocol import Address, Describe, Description, Failed, StoredFile, Write, Written
from pipelinerl.weights.publish.origin import Origin, SenderSettings
from pipelinerl.weights.transfer.checksum import added
from pipelinerl.weights.transfer.nccl import Groups
from pipelinerl.weights.transfer.wire import Connection

_descriptions: msgspec.json.Decoder[Description | Failed] = msgspec.json.Decoder(Description | Failed)
_files: msgspec.json.Decoder[Written | Failed] = msgspec.json.Decoder(Written | Failed)


class Ranks:
    """The ends of the trainer's ranks: rank 0's ``own``, and the addresses of ranks 1, 2, …."""

    def __init__(self, own: Origin, others: Sequence[Address], settings: SenderSettings):
        self._own, self._settings = own, settings
        self.addresses = (own.address, *others)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weight-ranks")

    @property
    def nccl(self) -> Groups:
        """The NCCL groups of rank 0's process."""
        return self._own.source_server.groups

    def describe(self, version: int, num_stripes: int) -> "Future[list[Description]]":
        """Asks the ranks that have a stripe to describe it. They may still be taking it.

        The future raises ``WeightUpdateError`` if a rank does not answer.
        """
        return self._pool.submit(lambda: [self._ask(version, rank) for rank in self.addresses[:num_stripes]])

    def checksum(self, descriptions: "Future[list[Description]]") -> "Future[str]":
        """Returns the future checksum of the whole version."""
        return self._pool.submit(lambda: added(description.checksum for description in descriptions.result()))

    def write(self, order: Write, num_stripes: int) -> list[StoredFile]:
        """Has the ranks that have a stripe write it to the store, and waits until all files are durable.

        Raises:
            WeightUpdateError: a rank is gone, or could not write its file.
        """
        connections = []
        try:
            for rank in self.addresses[1:num_stripes]:
                connections.append(Connection.dial(rank, self._settings.secret, self._settings.weights.timeout_s))
                connections[-1].send_message(order)
            own = self._own.write(order)
            while (written := own.reply(self._settings.weights.timeout_s)) is None:
                pass
            answers = [written, *(connection.receive_answer(_files) for connection in connections)]
        finally:
            for connection in connections:
                connection.close()
        for rank, answer in zip(self.addresses, answers, strict=False):
            if isinstance(answer, Failed):
                raise WeightUpdateError(f"the trainer rank at {rank}: {answer.error}")
        return [answer.file for answer in answers if isinstance(answer, Written)]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, version: int, rank: Address) -> Description:
        question = Describe(version=version)
        if rank == self._own.address:
            return self._own.describe(question)
        connection = Connection.dial(rank, self._settings.secret, self._settings.weights.timeout_s)
        try:
            answer: Description | Failed = connection.ask(question, _descriptions)
        finally:
            connection.close()
        if isinstance(answer, Failed):
            raise WeightUpdateError(f"the trainer rank at {rank}: {answer.error}")
        return answer
