// Stands in for the library of a tool that checks memory accesses: Cushion knows those by their names.
extern "C" __attribute__((visibility("default"))) int access_checker_is_loaded() { return 1; }
