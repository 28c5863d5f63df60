// Metrics: the live figures of the process as Prometheus text (exposition format 0.0.4), in a file for node_exporter's
// textfile collector. Written whole, then renamed.
#pragma once

namespace cushion {

class Runtime;

// To Program::metrics. A file that cannot be written is complained about once. Not in signal handlers. `running`: what
// the figure cushion_up says.
void write_metrics(Runtime& runtime, bool running) noexcept;

}  // namespace cushion
