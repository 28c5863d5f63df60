// Top: `cushion top`, the live figures of all of the user's processes under Cushion.
//
// Each round asks every process for its figures and waits 100 ms at most for those that answer. Bytes are there without
// an answer; where calls are not counted anew, the process made no allocation call since.
#pragma once

#include <string>

namespace cushion {

struct TopSettings {
  double interval_s = 1;
  std::string sort = "live";  // a key of sort_keys()
  bool once = false;
  bool json = false;  // one line a process; implies once
};

// "live", "held", ...; their first letters are the keys of the live view.
std::string sort_keys();
bool is_sort_key(const std::string& key);

int top(const TopSettings& settings);

}  // namespace cushion
