#!/bin/sh
# Makes .pkgview/alignedserve/<component>, a git-ignored tree of links through which type checkers and pytest read the package.
set -eu
cd "$(dirname "$0")/.."
mkdir -p .pkgview/alignedserve
for entry in src/alignedserve/*; do
  ln -sfn "../../$entry" ".pkgview/alignedserve/$(basename "$entry")"
done
for name in client cluster control decode_worker engine gateway kv_pool prefill_worker rank_host scheduler simulator transfer; do
  ln -sfn "../../$name" ".pkgview/alignedserve/$name"
done
ln -sfn ../../proto/messages .pkgview/alignedserve/proto
find .pkgview -xtype l -delete  # links to deleted files
ln -sfn ../.. .pkgview/root 2>/dev/null || true
rm -f .pkgview/root
