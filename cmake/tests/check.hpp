// The little that these tests need of a framework: TPK_CHECK counts and prints what is wrong and where.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

namespace tpk::test {

inline int failures = 0;
constexpr int kMostPrinted = 20;

inline void check(bool ok, const char* what, const char* file, int line, const std::string& context) {
  if (ok) return;
  if (++failures <= kMostPrinted) {
    std::fprintf(stderr, "%s:%d: not true: %s%s%s\n", file, line, what, context.empty() ? "" : ", with ",
                 context.c_str());
  }
}

inline int result(const char* name, long long cases) {
  std::printf("%s: %lld cases, %d failures\n", name, cases, failures);
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace tpk::test

#define TPK_CHECK(condition, context) \
  ::tpk::test::check((condition), #condition, __FILE__, __LINE__, (context))
