#!/bin/sh
# A git-ignored tree of links, .pkgview/alignedserve/<component>: type checkers and pytest read the package through it.
set -eu
cd "$(dirname "$0")/.."
mkdir -p .pkgview/alignedserve
for entry in src/alignedserve/*; do
  ln -sfn "../../$entry" ".pkgview/alignedserve/$(basename "$entry")"
done
for name in client cluster control decode_worker engine gateway kv_pool prefill_worker scheduler simulator transfer; do
  ln -sfn "../../$name" ".pkgview/alignedserve/$name"
done
ln -sfn ../../proto/messages .pkgview/alignedserve/proto
find .pkgview -xtype l -delete  # of files that are gone
ln -sfn ../.. .pkgview/root 2>/dev/null || true
rm -f .pkgview/root
