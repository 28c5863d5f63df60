#include "core/metrics.h"

#include <atomic>
#include <cstdint>

#include "core/device_bytes.h"
#include "core/runtime.h"
#include "core/totals.h"

namespace cushion {
namespace {

class Writer {
 public:
  Writer(Runtime& runtime, Out& out) noexcept : program_(runtime.program()), shared_(runtime.shared()), out_(out) {}

  void write(bool running) noexcept {
    head("cushion_up", "gauge", "1 while the process runs");
    line("cushion_up", running ? 1 : 0);
    head("cushion_device_bytes", "gauge", "Device memory by what it is used for");
    devices("cushion_device_bytes", &DeviceBytes::current);
    head("cushion_device_peak_bytes", "gauge", "The most that it was");
    devices("cushion_device_peak_bytes", &DeviceBytes::peak);
    const Totals totals(shared_);
    head("cushion_allocations_total", "counter", "Allocations by the driver's function and by whom they were served");
    for (int i = 0; i < kApis; ++i) {
      const auto allocations = [&](const char* by, std::uint64_t value) {
        line("cushion_allocations_total", value,
             [&] { out_.print(",function=\"{}\",served_by=\"{}\"", kApiNames[i], by); });
      };
      allocations("cushion", totals.served[i]);
      allocations("driver", totals.forwarded[i]);
    }
#define CUSHION_COUNTER(field, key, text)         \
  head("cushion_" key "_total", "counter", text); \
  line("cushion_" key "_total", totals.field);
    CUSHION_COUNTERS(CUSHION_COUNTER)
#undef CUSHION_COUNTER
  }

 private:
  void head(const char* name, const char* type, const char* help) noexcept {
    out_.print("# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
  }
  void line(const char* name, std::uint64_t value) noexcept {
    line(name, value, [] {});
  }
  template <class Labels>
  void line(const char* name, std::uint64_t value, Labels labels) noexcept {
    out_.print("{}{{pid=\"{}\",program=\"", name, program_.pid);
    label(program_.name);
    if (!program_.rank.empty()) {
      out_.raw("\",rank=\"");
      label(program_.rank);
    }
    out_.raw("\"");
    labels();
    out_.print("}} {}\n", value);
  }
  // A label's value: its three special characters are escaped, and what is no UTF-8 is replaced.
  void label(std::string_view text) noexcept {
    const Printable<256> shown(text);  // outlives its view
    for (const char c : shown.view()) {
      if (c == '"' || c == '\\') out_.raw("\\");
      out_.raw({&c, 1});
    }
  }
  template <class Figures>
  void devices(const char* name, Figures figures) noexcept {
    for (int d = 0; d < Shared::kDevices; ++d) {
      const DeviceBytes bytes(shared_, d);
      if (!bytes.any()) continue;
      for (int i = 0; i < DeviceBytes::kFigures; ++i) {
        line(name, (bytes.*figures)[i], [&] { out_.print(",device=\"{}\",kind=\"{}\"", d, DeviceBytes::kKeys[i]); });
      }
    }
  }

  const Runtime::Program& program_;
  Shared& shared_;
  Out& out_;
};

}  // namespace

void write_metrics(Runtime& runtime, bool running) noexcept {
  static constinit std::atomic<bool> complained{false};
  const char* path = runtime.program().metrics.c_str();
  const int error = write_whole(path, [&](Out& out) { Writer(runtime, out).write(running); });
  if (error != 0 && !complained.exchange(true)) complain_of("METRICS", path, error);
}

}  // namespace cushion
