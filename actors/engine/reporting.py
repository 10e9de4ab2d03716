"""Reporting: samples the lag of the loop, and writes periodic log lines and the log and file of requests."""

from __future__ import annotations

from actors.options import Arguments
from actors.runtime import ActorSystem
from telemetry.logs.gc_watch import GcWatch
from telemetry.logs.request_file import RequestFile
from telemetry.logs.request_log import RequestLog
from telemetry.logs.request_times import RequestTimes
from telemetry.logs.step_log import StepLog
from telemetry.metrics.engine import EngineMetrics
from telemetry.timeline import Timelines

__all__ = ["Reporting"]


class Reporting:
    """Starts the reports that the arguments enable. The actor system owns its tasks; global hooks last from
    :meth:`start` to :meth:`stop`."""

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
