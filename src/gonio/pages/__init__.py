"""What all pages share: the frame, the style sheet, the script, the content security policy, and charts over depth."""
