"""A process of the resume tests. It imports nothing of itself: Megatron starts processes that run this file again."""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

    from resume_cases import main

    main()
