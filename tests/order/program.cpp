#include "tests/order/program.h"

#include <fmt/format.h>

namespace order {

const char* NameOf(Do what) {
  switch (what) {
#define STEP(name, fields, sentence) \
  case Do::name:                     \
    return #name;
#include "tests/order/steps.def"
#undef STEP
  }
  return "?";
}

Step Plain(Step step) {
  enum : unsigned {
    kContext = 1,
    kStream = 2,
    kEvent = 4,
    kBlock = 8,
    kFrom = 16,
    kGraph = 32,
    kFlag = 64,
    kMode = 128,
    kBytes = 256
  };
  unsigned used = 0;
  switch (step.what) {
#define STEP(name, fields, sentence) \
  case Do::name:                     \
    used = fields;                   \
    break;
#include "tests/order/steps.def"
#undef STEP
  }
  // The legacy stream and the thread's own one lie in the step's context.
  if ((used & kStream) != 0 && step.stream < kFirstCreatedStream) used |= kContext;
  if ((used & kStream) != 0 && step.stream == 0) used |= kMode;
  const Step usual;
  const auto keep = [&](unsigned field, auto Step::*member) {
    if ((used & field) == 0) step.*member = usual.*member;
  };
  keep(kContext, &Step::context);
  keep(kStream, &Step::stream);
  keep(kEvent, &Step::event);
  keep(kBlock, &Step::block);
  keep(kFrom, &Step::from);
  keep(kGraph, &Step::graph);
  keep(kFlag, &Step::flag);
  keep(kMode, &Step::mode);
  keep(kBytes, &Step::bytes);
  return step;
}

std::string Print(const Step& step) {
  std::string text = fmt::format("{{.what = Do::{}", NameOf(step.what));
  const Step usual;
  const auto field = [&](const char* name, auto value, auto otherwise) {
    if (value != otherwise) text += fmt::format(", .{} = {}", name, value);
  };
  field("thread", step.thread, usual.thread);
  field("context", step.context, usual.context);
  field("stream", step.stream, usual.stream);
  field("event", step.event, usual.event);
  field("block", step.block, usual.block);
  field("from", step.from, usual.from);
  field("graph", step.graph, usual.graph);
  field("flag", step.flag, usual.flag);
  field("mode", step.mode, usual.mode);
  field("bytes", step.bytes, usual.bytes);
  return text + "}";
}

std::string Print(const Program& program) {
  std::string text = "{\n";
  for (const Step& step : program) text += "    " + Print(step) + ",\n";
  return text + "}";
}

}  // namespace order
