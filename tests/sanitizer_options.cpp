// The defaults of the sanitizers' options in every program of a sanitizer's build; the environment overrides them.

// A process that ends while other threads live, as every one does that used a stream a moment ago, would sleep a second
// so that races in its last moments are seen: many minutes over all tests.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() { return "atexit_sleep_ms=0"; }

// The dynamic linker frees an ended thread's variables of dlopen'ed libraries when another thread takes over its stack:
// what orders the two is a lock of glibc's that the sanitizer does not see.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions() {
  return "race:_dl_deallocate_tls\n";
}
