// A shared library by the CUDA runtime's name, for a program to need.
extern "C" __attribute__((visibility("default"))) int cudaDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
