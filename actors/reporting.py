"""What reports on an engine while it lives: the sampler of the loop's lag, log lines, the log and the file of
requests."""

from __future__ import annotations

from actors.arguments import Arguments
from actors.runtime import ActorSystem
from telemetry.gc_watch import GcWatch
from telemetry.metrics import EngineMetrics
from telemetry.request_file import RequestFile
from telemetry.request_log import RequestLog
from telemetry.request_times import RequestTimes
from telemetry.step_log import StepLog
from telemetry.timeline import Timelines

__all__ = ["Reporting"]


class Reporting:
    """Listens where the arguments want it. Its tasks are the actor system's; what is global lasts from :meth:`start`
    to :meth:`stop`."""

    def __init__(self, arguments: Arguments, metrics: EngineMetrics, timelines: Timelines) -> None:
        self._metrics = metrics
        self._file: RequestFile | None = None
        self._gc: GcWatch | None = None
        if arguments.log_requests:
            as_json = (arguments.log_requests_format or arguments.log_format) == "json"
            timelines.listen(RequestLog(level=arguments.log_requests_level, as_json=as_json))
        metrics.listen(timelines)
        if arguments.enable_request_time_stats_logging:
            timelines.listen(RequestTimes())
        if arguments.export_metrics_to_file_dir is not None:
            self._file = RequestFile(arguments.export_metrics_to_file_dir)
            timelines.listen(self._file)
        if arguments.decode_log_interval:
            metrics.steps.log = StepLog(arguments.decode_log_interval, metrics.read)
        if arguments.gc_warning_threshold_secs:
            self._gc = GcWatch(arguments.gc_warning_threshold_secs)

    def start(self, system: ActorSystem) -> None:
        if self._metrics.enabled:
            system.start_task(self._metrics.loop_lag.sample, "troupe-loop-lag")
        if self._file is not None:
            system.start_task(self._file.write, "troupe-request-file")
        if self._gc is not None:
            self._gc.start()

    def stop(self) -> None:
        """Idempotent."""
        if self._gc is not None:
            self._gc.stop()
