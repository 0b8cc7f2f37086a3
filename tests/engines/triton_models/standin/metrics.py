"""The metrics of a stand-in: the names that TensorRT-LLM's C++ backend publishes, and our own for the tests to ask."""

import triton_python_backend_utils as pb

REQUESTS = ("active", "max", "scheduled", "context", "waiting")
BLOCKS = ("max", "free", "used", "tokens_per", "reused", "fraction")
ENDS = ("stop", "length", "cancelled", "error")


class Metrics:
    """`public` is whether it publishes TensorRT-LLM's own; `standin_active` and `standin_ended` are always there."""

    def __init__(self, engine, version, public):
        self.families = []
        labels = {"model": engine.name, "version": version}
        self.active = self._family("standin_active").Metric(labels=labels)
        ended = self._family("standin_ended")
        self.ended = {reason: ended.Metric(labels={**labels, "reason": reason}) for reason in ENDS}
        self.requests = self.blocks = {}
        if public:
            family = self._family("nv_trt_llm_request_metrics")
            self.requests = {kind: family.Metric(labels={**labels, "request_type": kind}) for kind in REQUESTS}
            family = self._family("nv_trt_llm_kv_cache_block_metrics")
            self.blocks = {kind: family.Metric(labels={**labels, "kv_cache_block_type": kind}) for kind in BLOCKS}
        self.told = None
        self.update(engine)

    def _family(self, name):
        family = pb.MetricFamily(name=name, description=name, kind=pb.MetricFamily.GAUGE)
        self.families.append(family)
        return family

    def update(self, engine):
        news = (len(engine.running), len(engine.waiting), engine.used, sum(engine.ended.values()))
        if news == self.told:
            return
        self.told = news
        running, waiting, used, _ = news
        self.active.set(running + waiting)
        for reason, metric in self.ended.items():
            metric.set(engine.ended[reason])
        values = {"active": running + waiting, "max": engine.slots, "scheduled": running, "waiting": waiting}
        for kind, metric in self.requests.items():
            metric.set(values.get(kind, 0))
        values = {
            "max": engine.kv_blocks,
            "free": engine.kv_blocks - used,
            "used": used,
            "tokens_per": engine.per_block,
            "fraction": used / engine.kv_blocks,
        }
        for kind, metric in self.blocks.items():
            metric.set(values.get(kind, 0))
