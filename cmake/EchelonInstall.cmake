# Installed package: filled by cmake --install.
