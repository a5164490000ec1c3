// Constants of a cost model as text: a line "name number" for each, of the cost model's visit_constants.
#pragma once

#include <charconv>
#include <cmath>
#include <cstdio>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>

#include "host/cost_model.hpp"

namespace tpk {

template <typename Cost>
std::string cost_text(const Cost& cost) {
  std::string text;
  visit_constants(cost, [&](const std::string& name, double value) {
    char number[32];
    std::snprintf(number, sizeof number, "%.17g", value);
    text += name + " " + number + "\n";
  });
  return text;
}

// What cost_text wrote: every constant once, in any order, none of them negative. Throws
// std::invalid_argument with a sentence.
template <typename Cost>
Cost parse_cost(std::string_view text) {
  std::map<std::string, double> given;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(line.size() == text.size() ? line.size() : line.size() + 1);
    const size_t space = line.rfind(' ');
    double value = -1;
    if (space != std::string_view::npos) {
      const auto end = line.data() + line.size();
      if (std::from_chars(line.data() + space + 1, end, value).ptr != end) value = -1;
    }
    if (!std::isfinite(value) || value < 0 || !given.emplace(line.substr(0, space), value).second) {
      throw std::invalid_argument(
          "constants must be lines of a name and a number of 0 or more, each name once, but '" +
          std::string(line) + "' is not.");
    }
  }
  Cost cost{};
  size_t used = 0;
  visit_constants(cost, [&](const std::string& name, double& value) {
    const auto found = given.find(name);
    if (found == given.end())
      throw std::invalid_argument("constants must have '" + name + "', but have not.");
    value = found->second;
    ++used;
  });
  if (used != given.size()) {
    throw std::invalid_argument("constants must be those of the cost model and no others: " +
                                std::to_string(used) + ", not " + std::to_string(given.size()) + ".");
  }
  return cost;
}

// Take these constants, or, where the text is empty, those that the library came with.
template <typename Cost>
void use_cost(CostInUse<Cost>& in_use, const Cost& usual, std::string_view text) {
  in_use.set(text.empty() ? usual : parse_cost<Cost>(text));
}

}  // namespace tpk
