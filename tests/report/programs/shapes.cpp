#include "shapes.h"

void library_call(int depth);

namespace shapes {

template <class T>
struct Grid {
  INLINED static void fill(T value) {
    if (value != T()) site("fill");  // fill
    KEEP;
  }
  ALONE void make(const char* name) const {
    site(name);  // make
    KEEP;
  }
};

INLINED void outer(int count) {
  for (int i = 0; i < count; ++i) {
    Grid<float>::fill(static_cast<float>(count));  // outer
  }
}

}  // namespace shapes

namespace {

ALONE void hidden() {
  site("hidden");  // hidden
  KEEP;
}

}  // namespace

int main(int argc, char**) {
  shapes::outer(argc);                  // main
  shapes::Grid<double>().make("make");  // main makes
  hidden();
  const auto lambda = [] {
    site("lambda");  // lambda
    KEEP;
  };
  lambda();  // main calls lambda
  library_call(argc);
  KEEP;
}
