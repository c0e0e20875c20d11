// The daemon of a pool: takes requests, decides, and starts and ends jobs.
#pragma once

#include <filesystem>
#include <string>

#include "echelon/pool/devices.h"
#include "echelon/pool/remote.h"
#include "echelon/pool/settings.h"

namespace echelon::pool {

/// Runs until SIGTERM or SIGINT; jobs go on, and the next daemon of this folder
/// adopts them. Returns the exit code. Throws ConfigError when another daemon
/// has the folder, another version wrote it, or more is guaranteed than there
/// is.
///
///   name    of the settings' file, for errors
///   remote  what is served over TCP; also throws what serve_remotely() does
int serve(
    const std::filesystem::path& folder, const Settings& settings,
    const std::string& name, const PoolDevices& devices,
    const RemoteOptions& remote = {});

}  // namespace echelon::pool
