// Stands for libcushion.so where only the preloading is tested.
extern "C" __attribute__((visibility("default"))) int fixture_preload() { return 0; }
