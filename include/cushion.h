/* cushion.h: what a program may tell Cushion about itself. C, from C99 on; C++ too.
 *
 * Nothing needs to be linked (before glibc 2.34: -ldl): each function is looked up in the process when it is first
 * called. In a process without Cushion it does nothing and answers CUSHION_NOT_LOADED, so calls may stay in the
 * program.
 *
 * Thread safety: every function may be called from any thread at any time, but not from a signal handler or between
 * vfork and exec. None throws, and none calls CUDA.
 * Errors: 0 is success; the rest is enum cushion_result. Nothing is printed.
 *
 *     #include <cushion.h>
 *     cushion_set_track("stacks");
 *     for (int epoch = 0; epoch < 10; ++epoch) { cushion_mark("epoch"); train(); }
 *     cushion_report("/tmp/after-training.json");
 */
#ifndef CUSHION_H
#define CUSHION_H

enum cushion_result {
  CUSHION_OK = 0,
  CUSHION_NOT_LOADED = 1,  /* the process runs without Cushion */
  CUSHION_NOT_SERVING = 2, /* it is loaded and stepped aside (CUSHION_DISABLE, bad options, a forked child), the process
                              ends, or (cushion_report) no device memory was allocated yet */
  CUSHION_INVALID = 3,     /* a null pointer where there must be a text, or no such level */
  CUSHION_FULL = 4,        /* cushion_mark: 256 marks are kept already */
  CUSHION_NOT_WRITTEN = 5  /* cushion_report: the file cannot be written; errno says why */
};

#ifndef CUSHION_DECLARATIONS_ONLY

#include <dlfcn.h>

/* `known`: what an earlier call found; itself if that was nothing; null before the first. */
static inline void* cushion_find_(const char* name, void** known) {
  void* const nothing = known;
  void* found = __atomic_load_n(known, __ATOMIC_RELAXED);
  if (found == 0) {
    found = dlsym(0, name); /* 0: RTLD_DEFAULT, whose name needs _GNU_SOURCE */
    if (found == 0) found = nothing;
    __atomic_store_n(known, found, __ATOMIC_RELAXED);
  }
  return found == nothing ? 0 : found;
}

#define CUSHION_CALL_(name, argument)               \
  static void* known;                               \
  int (*call)(const char*);                         \
  void* const found = cushion_find_(#name, &known); \
  if (found == 0) return CUSHION_NOT_LOADED;        \
  __builtin_memcpy(&call, &found, sizeof call);     \
  return call(argument);

/* Switches tracking: `level` is a value of CUSHION_TRACK ("off", "on", "stacks", "sampled", "sampled:512KiB"). From any
 * thread's next allocation on; blocks allocated before keep what is known of them. Before the first device allocation
 * it counts instead of CUSHION_TRACK and CUSHION_TRACK_AFTER. Cost: 0.2 us. */
static inline int cushion_set_track(const char* level) { CUSHION_CALL_(cushion_set_track, level) }

/* Keeps a moment for the report: `name` (63 bytes of it), how long before the report, and the bytes live then, all
 * devices together. The first 256 are kept. Cost: 0.3 us. */
static inline int cushion_mark(const char* name) { CUSHION_CALL_(cushion_mark, name) }

/* Writes the report of this moment to `path`: JSON, or text if it ends in .txt; null: text on stderr. What was there is
 * replaced when the report is whole. Cost: 0.1 us for each live block, and the file's writing. */
static inline int cushion_report(const char* path) { CUSHION_CALL_(cushion_report, path) }

#undef CUSHION_CALL_

#endif /* CUSHION_DECLARATIONS_ONLY */
#endif /* CUSHION_H */
