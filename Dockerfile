# Echelon on Debian 12, from the tarball that `make package` makes:
#
#   make package && docker build -t echelon .
#   docker run --rm echelon doctor
FROM debian:12
ARG VERSION=0.1.0
COPY dist/echelon-${VERSION}-linux-x86_64.tar.gz /tmp/echelon.tar.gz
RUN mkdir -p /opt/echelon \
 && tar -xzf /tmp/echelon.tar.gz -C /opt/echelon --strip-components=1 \
 && rm /tmp/echelon.tar.gz
RUN ECHELON_CACHE=/opt/echelon-cache /opt/echelon/get-libtorch.sh
ENV PATH=/opt/echelon/bin:$PATH
WORKDIR /work
ENTRYPOINT ["echelon"]
CMD ["--help"]
