"""A custom colocated system: decodes wait while a prompt is computed whole in its own pass, as in early vLLM.

alignedserve simulate --policy examples.one_prompt_at_a_time:OnePromptAtATime --trace mix:short=0.9,requests=200
"""

from typing import ClassVar

from alignedserve.scheduler.colocated.continuous import ContinuousScheduler


class OnePromptAtATime(ContinuousScheduler):
    """Prompts take priority over decodes. The request that joined last is preempted first."""

    OPTIONS: ClassVar = {"max_num_seqs": 64}

    def __init__(self, options, allocator, block_size):
        super().__init__(options, allocator, block_size)
        self.max_num_seqs = options["max_num_seqs"]

    def _fill(self, draft, now_s):
        if self._waiting and len(self._running) < self.max_num_seqs:
            member = next(iter(self._waiting.values()))
            if self._cover(member, member.left):
                self._admit(member)
                draft.add(member, member.left)
                return
        for member in list(self._running.values()):
            if member.request.key in self._running:
                victims = iter(list(reversed(self._running.values())))
                if self._cover_by_preempting(member, 1, victims, draft):
                    draft.add(member, 1)
