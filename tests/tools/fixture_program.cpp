// A program that differs only in how it is linked.
#ifdef CALL
extern "C" int CALL(int*);
#endif

int main(int argc, char**) {
#ifdef STATIC_RUNTIME
  // The static CUDA runtime is known by the text of its error table.
  static const char kText[] = "CUDA driver version is insufficient for CUDA runtime version";
  return kText[argc] == 'U' ? 0 : 1;
#elif defined(CALL)
  int version = argc;
  return CALL(&version);
#else
  return argc == 1 ? 0 : 1;
#endif
}
