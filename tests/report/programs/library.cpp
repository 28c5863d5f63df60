#include "shapes.h"

namespace {

INLINED void innermost() {
  site("innermost");  // innermost
  KEEP;
}

}  // namespace

static ALONE void in_symtab_only(int depth) {
  if (depth > 0) innermost();  // in_symtab_only
  site("static");              // static
  KEEP;
}

void library_call(int depth) {
  in_symtab_only(depth);
  site("exported");  // exported
  KEEP;
}
