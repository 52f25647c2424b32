"""Criteo click logs with the same columns: Kaggle Display Advertising (one file) and the 1TB logs (one file per day)."""

from rayrec.data.logs.splits import Split
from rayrec.datasets.published_files import RemoteFile
from rayrec.schema import Schema

SCHEMA = Schema(
    label="label", dense=tuple(f"int_{i}" for i in range(13)), sparse=tuple(f"cat_{i}" for i in range(26)), tokens="hexadecimal"
)
"""Schema: label, 13 integers, 26 categories of 8 hexadecimal digits. Any feature may be empty."""

KAGGLE_SPLIT = Split(kind="sevenths")
"""Split of train.txt, which has seven days in time order."""

TERABYTE_SPLIT = Split(kind="last_file")
"""Split of day_0 to day_23, with the last day held out."""

_TERMS = "Criteo publishes its click logs under CC BY-NC-SA 4.0: not for commercial use; see https://ailab.criteo.com"

# Size: Content-Length of go.criteo.net, and figshare article 5732310, which also has the md5.
_KAGGLE_ARCHIVE = RemoteFile(
    name="criteo-research-kaggle-display-advertising-challenge-dataset.tar.gz",
    url="https://go.criteo.net/criteo-research-kaggle-display-advertising-challenge-dataset.tar.gz",
    page="https://ailab.criteo.com/kaggle-contest-dataset-now-available-academic-use/",
    terms=_TERMS,
    size_bytes=4_576_820_670,
    md5="df9b1b3766d9ff91d5ca3eb3d23bed27",
)

# md5 of the members: instructions of the challenge winners (kaggle-2014-criteo). Sizes are rounded to 0.01 GiB.
KAGGLE_FILES = tuple(
    RemoteFile(name=name, about_bytes=round(gib * 2**30), md5=md5, rows=rows, archive=_KAGGLE_ARCHIVE)
    for name, gib, md5, rows in (
        ("train.txt", 10.38, "4dcfe6c4b7783585d4ae3c714994f26a", 45_840_617),
        ("test.txt", 1.35, "94ccf2787a67fd3d6e78a62129af0ed9", 6_042_135),
    )
)
"""Files train.txt and test.txt. The latter has no labels (39 columns)."""

# Rows: mlcommons/training recommendation_v2 (TorchRec's ROWS_PER_DAY). KiB on disk (`du`) and md5 of the .gz:
# mlcommons/inference recommendation/dlrm/pytorch/README.md, measured in 2020 on a copy that Criteo has moved since.
_DAYS = (
    # rows, KiB of day_N.gz, its md5, KiB of day_N
    (195_841_983, 15927304, "6cef23542552c3195e9e6e2bdbc4c235", 48603344),
    (199_563_535, 16292832, "94b73908ee8f912c175420376c8952db", 49518248),
    (196_792_019, 16022296, "c3c0272c26cfaa03d932b2856a751ff5", 48820460),
    (181_115_208, 14779644, "b727ecfaaf482507bb998248833aa4c2", 44863556),
    (152_115_810, 12514396, "b99eaa6e324e49d9df4e6f840e76b6d9", 37583076),
    (172_548_507, 14169436, "1294d0a56a90294aebf80133078d9879", 42691840),
    (204_846_845, 16753584, "68586521483313e13aefb29e7b767fdb", 50857184),
    (200_801_003, 16465452, "a2c1c4bfec20fc88b0b504175a16b644", 49874324),
    (193_772_492, 15845316, "faabf247fd56140a76effa6a3da63253", 48082108),
    (198_424_372, 16195668, "ee3347a28c1dd2fb2c92094e643c132b", 49252856),
    (185_778_055, 15201768, "d043c2ec0346eb4c71aaae935416688e", 46029928),
    (153_588_700, 12698432, "8d4ba32f0c4f654a3860b6f2ae1a8ea7", 37983540),
    (169_003_364, 14029428, "908480917ed39be2a2ad2e1c339c40b4", 41832600),
    (194_216_520, 15953380, "567d6bfa672dd10a0cf76feaec0cf92b", 48109928),
    (194_081_279, 15882872, "ed377357aecaccc5f93c754c4819fd8d", 48059080),
    (187_154_596, 15382724, "8e91f2a8d3d95202dfc3b22b88064c12", 46383644),
    (177_984_934, 14606256, "387269870bf8ec7d285cf0e8ce82e92e", 44094432),
    (163_382_602, 13483480, "48d3538fcf04807e0be4d72072dbda0b", 40374712),
    (142_061_091, 11796984, "f26e23b6ef242f40b0e3fd92c986170c", 35039044),
    (156_534_237, 13059032, "3f6f36657b0ff1258428356451eea6c8", 38662560),
    (193_627_464, 16022492, "db7ff2b830817d3b10960f02bfb68547", 47981304),
    (192_215_183, 15707044, "f1a4ba7f7a555cb4a7e724a082479f4a", 47650792),
    (189_747_893, 15463520, "848ae20c4eab730ae487acc8ddaf52ba", 47037532),
    (178_274_637, 14591792, "a2748bdbc67dd544b3ac470c4f1a52df", 44152268),
)

FULL_DAYS = tuple(
    RemoteFile(
        name=f"day_{day}.gz",
        url=f"https://storage.googleapis.com/criteo-cail-datasets/day_{day}.gz",
        page="https://ailab.criteo.com/download-criteo-1tb-click-logs-dataset",
        terms=_TERMS,
        about_bytes=kib << 10,
        md5=md5,
        unpacked_about_bytes=unpacked_kib << 10,
        rows=rows,
    )
    for day, (rows, kib, md5, unpacked_kib) in enumerate(_DAYS)
)
"""Files of the 1TB click logs: 24 days, of which usually the first 23 are for training."""

SMALL_DAYS = (*FULL_DAYS[:4], FULL_DAYS[23])
"""Files of four training days and the same last day (`criteo_small` of Intel e2eAIOK)."""
