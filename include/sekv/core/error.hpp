// The one exception family that crosses the public boundary.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace sekv {

/// Why a call failed; stable numbers, so that a C API can return them.
enum class errc : std::int32_t {
    invalid_argument = 1,  ///< a shape, size or value that the call can't take
    state = 2,             ///< a sequence that is closed, or a call out of order
    budget = 3,            ///< a tier's byte budget would be exceeded
    unsupported = 4,       ///< asked for something that this build or backend lacks
    format = 5,            ///< a file that is damaged, foreign or of another model
    io = 6,                ///< the operating system refused a read or write
    device = 7,            ///< a CUDA call failed: a launch refused, a copy, a lost context
};

/// Base of every exception that sekv throws. Unless a function says otherwise, a call that throws has
/// left the cache as it was (strong guarantee).
class error : public std::runtime_error {
public:
    error(errc code, const std::string& sentence) : std::runtime_error(sentence), code_(code) {}
    [[nodiscard]] errc code() const noexcept { return code_; }

private:
    errc code_;
};

class invalid_argument : public error {
public:
    explicit invalid_argument(const std::string& sentence) : error(errc::invalid_argument, sentence) {}
};

class state_error : public error {
public:
    explicit state_error(const std::string& sentence) : error(errc::state, sentence) {}
};

class unsupported : public error {
public:
    explicit unsupported(const std::string& sentence) : error(errc::unsupported, sentence) {}
};

class format_error : public error {
public:
    explicit format_error(const std::string& sentence) : error(errc::format, sentence) {}
};

class io_error : public error {
public:
    explicit io_error(const std::string& sentence) : error(errc::io, sentence) {}
};

/// A failed device call. Whether the cache is as it was depends on when the device noticed: see `lost`.
class device_error : public error {
public:
    device_error(const std::string& sentence, bool lost) : error(errc::device, sentence), lost_(lost) {}
    /// True when the device context is gone or sticky-failed: nothing on the device can be read any more, and the cache can only be destroyed.
    /// False for a call that was refused before it ran.
    [[nodiscard]] bool lost() const noexcept { return lost_; }

private:
    bool lost_;
};

/// A byte budget that would be exceeded; raised before anything is touched.
class budget_error : public error {
public:
    budget_error(const std::string& sentence, std::uint64_t requested, std::uint64_t available)
        : error(errc::budget, sentence), requested_(requested), available_(available) {}
    [[nodiscard]] std::uint64_t requested() const noexcept { return requested_; }
    [[nodiscard]] std::uint64_t available() const noexcept { return available_; }

private:
    std::uint64_t requested_;
    std::uint64_t available_;
};

}  // namespace sekv
