"""Makes every process of a cluster recount its stores and check its state. Processes that do not answer are listed."""

from __future__ import annotations

import asyncio

import grpc

from alignedserve.cluster.supervisor.roster import Roster
from alignedserve.control.rpc import open_channel
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.proto import supervisor_pb2_grpc as sv_grpc

ASK_TIMEOUT_S = 10.0


async def check_cluster(roster: Roster, token: str, timeout_s: float = ASK_TIMEOUT_S) -> sv.IntegrityReport:
    """The findings of all processes, within `timeout_s` each."""
    hellos = [member.hello for member, _ in roster.members()]
    reports = await asyncio.gather(*(_ask(hello, token, timeout_s) for hello in hellos))
    return sv.IntegrityReport(books=[book for report in reports for book in report.books])


async def _ask(hello: sv.RoleHello, token: str, timeout_s: float) -> sv.IntegrityReport:
    channel = open_channel(hello.address, token)
    try:
        report: sv.IntegrityReport = await sv_grpc.RoleStub(channel).CheckIntegrity(pb.Empty(), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        problem = f"the process does not answer: {error.code().name}"
        silent = sv.BookCheck(store="all", instance=hello.process.id, problem=problem, unknown=True)
        return sv.IntegrityReport(books=[silent])
    finally:
        await channel.close()
    return report
